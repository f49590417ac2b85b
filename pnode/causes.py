"""From an error in a VNode's action to the cause of a failed run: would it come again on another PNode? Pure.

Only what lies with this PNode is `COMPUTE` (its thread ended, its memory ran out) or `STORE`. All other errors are of
the data, of the network or of DCNR: the same step fails wherever it is made.
"""

from __future__ import annotations

from pnode.compute_thread import ComputeDeadError
from pnode.events import Cause
from storage.store import CorruptError, StoreError
from wire.errors import BadFileError, DCNRError

_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def said(text: str, pnode: str) -> str:
    """What was said on this PNode, for those who read it on another machine."""
    return text.replace("this machine", pnode)


def thread_ended(pnode: str, device: str, action: str, error: BaseException) -> str:
    """What is told of an action that raised what is no `Exception`: nothing is computed on that device any more."""
    return f"the compute thread of {pnode} ({device}) is dead: {action} ended it: {error!r}"


def cause_of(error: BaseException) -> Cause:
    """The cause that a run fails with when an action raised `error`."""
    if not isinstance(error, Exception) or isinstance(error, MemoryError | ComputeDeadError):
        return Cause.COMPUTE
    if isinstance(error, BadFileError | CorruptError | IndexError):
        return Cause.INPUT
    if isinstance(error, StoreError):
        return Cause.STORE
    if not isinstance(error, DCNRError) and any(text in str(error).lower() for text in _NO_MEMORY):
        return Cause.COMPUTE
    return Cause.DEFECT

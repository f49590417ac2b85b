"""Names and numbers that identify things on the wire, and the one rule for what an id may look like."""

from __future__ import annotations

import os
import re
import secrets
import time
from typing import NewType

from wire.errors import MisuseError
from wire.limits import ID_CHARS

PeerId = NewType("PeerId", str)
"""A process's name: of a PNode its id, of the orchestrator and of clients a name they chose."""

Boot = NewType("Boot", int)
"""The number that a process drew at its start; a restart draws another. 0: not known."""

SessionId = NewType("SessionId", str)
NetworkId = NewType("NetworkId", str)
RequestId = NewType("RequestId", str)
Lane = NewType("Lane", int)
Stream = NewType("Stream", int)
"""Numbers one life of the link from a process to a peer; a link that was given up begins again under a larger one."""

ID_PATTERN = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{ID_CHARS - 1}}}")


def is_id(text: str) -> bool:
    """Whether `text` may name a peer, network or session: it ends up in paths, keys and socket identities."""
    return ID_PATTERN.fullmatch(text) is not None


def checked_id(text: str, what: str = "id") -> str:
    """`text` itself. Raises `MisuseError` if it is not an id."""
    if not is_id(text):
        raise MisuseError(
            f"{what} {text[:80]!r} is not allowed",
            hint=f"use 1 to {ID_CHARS} of a-z, 0-9, - and _, beginning with a letter or digit",
        )
    return text


def new_boot() -> Boot:
    """A boot number: grows over restarts on one machine (seconds), and is unlike that of any other start (random)."""
    return Boot((int(time.time()) << 20 | secrets.randbits(20)) & ((1 << 63) - 1) or 1)


class RequestIds:
    """Makes request ids that no other process makes: a random prefix and a counter."""

    def __init__(self, prefix: str | None = None) -> None:
        self._prefix = prefix if prefix is not None else secrets.token_hex(6)
        self._pid = os.getpid()
        self._count = 0

    def __call__(self) -> RequestId:
        if self._pid != os.getpid():
            self._pid, self._prefix, self._count = os.getpid(), secrets.token_hex(6), 0
        self._count += 1
        return RequestId(f"{self._prefix}-{self._count}")


new_request_id = RequestIds()
"""The process's own generator: `new_request_id()`."""

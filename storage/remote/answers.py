"""The codes with which the service refuses, and the errors that they are on the other side."""

from __future__ import annotations

from storage.keys import BadKeyError
from storage.store import ConflictError, CorruptError, NotFoundError, StoreError, StoreUnavailableError
from wire.errors import DCNRError
from wire.requests import RefusedError

NOT_FOUND = "not-found"
CONFLICT = "conflict"
CORRUPT = "corrupt"
BAD_KEY = "bad-key"
UNAVAILABLE = "unavailable"
"""The store behind the service does not answer, or is full."""
QUOTA = "quota"
FORBIDDEN = "forbidden"
CHANGED = "changed"
"""The object is not the one any more of which a piece was asked for."""
NO_TRANSFER = "no-transfer"
"""Nothing is staged under that name: begin anew."""
BUSY = "busy"
"""Too much is asked for at once: ask again, later."""
FAILED = "failed"

_CODES: tuple[tuple[type[DCNRError], str], ...] = (
    (NotFoundError, NOT_FOUND), (ConflictError, CONFLICT), (CorruptError, CORRUPT), (BadKeyError, BAD_KEY),
    (StoreUnavailableError, UNAVAILABLE),
)  # fmt: skip


class Refusal(DCNRError):
    """What the service answers instead of what it was asked for."""

    def __init__(self, code: str, text: str, hint: str = "") -> None:
        super().__init__(text, hint=hint)
        self.code = code


def refusal_of(error: DCNRError) -> Refusal:
    """What to answer after an error of the store's."""
    if isinstance(error, Refusal):
        return error
    code = next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)
    return Refusal(code, error.message, error.hint)


class ChangedError(StoreError):
    """An object was replaced while it was read."""


class NoTransferError(StoreError):
    """The service has nothing of a transfer that it was told of before. `unsure`: see `UnsureConflictError`."""

    unsure = False


class UnsureConflictError(ConflictError):
    """A condition did not hold, but the answer to an earlier try was lost: what is there may be our own."""


def error_of(refused: RefusedError, key: str, *, unsure: bool) -> DCNRError:
    """The error to raise for a refusal. `unsure`: it may have been carried out before, and its answer was lost."""
    text, hint = refused.message, refused.hint
    match refused.code:
        case "not-found":
            return NotFoundError(text, key=key, hint=hint)
        case "conflict":
            return (UnsureConflictError if unsure else ConflictError)(text, key=key, hint=hint)
        case "corrupt":
            return CorruptError(text, key=key, hint=hint)
        case "bad-key":
            return BadKeyError(text, hint=hint)
        case "changed":
            return ChangedError(text, key=key, hint=hint)
        case "no-transfer":
            lost = NoTransferError(text, key=key, hint=hint)
            lost.unsure = unsure
            return lost
        case "unavailable" | "quota":
            return StoreUnavailableError(text, key=key, hint=hint)
        case _:
            return StoreError(text, key=key, hint=hint)

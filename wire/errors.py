"""The root of every error DCNR raises for a foreseen reason.

Two families matter to a caller: a `MisuseError` is our own side's fault (a bug or a wrong argument), a `RemoteError`
is the other side's (a peer, a store or a file broke the rules). Both say where, what was expected, what came, and
what to do next.
"""

from __future__ import annotations


class DCNRError(Exception):
    """A foreseen failure with a message for a person.

    `hint` is the next step to take; `exit_code` is what the command line ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class MisuseError(DCNRError):
    """This side called something in a way that its rules forbid."""


class RemoteError(DCNRError):
    """The other side (peer, store, file) did something that its rules forbid."""


class UnreachableError(DCNRError):
    """A peer or store did not answer within its deadline."""

    exit_code = 69


class BadFileError(DCNRError):
    """A file that a person wrote can't be used as it is."""

    exit_code = 65


class UsageError(DCNRError):
    """A command was called with arguments that make no sense."""

    exit_code = 2

"""An object on its way in pieces: what to ask for or to send next, in which order it is handed on, where to go on.

Pure: no clock, no socket. `Download` belongs to whoever gets an object, `Upload` to whoever gives one.
"""

from __future__ import annotations

from dataclasses import dataclass

from wire.errors import RemoteError


class PieceError(RemoteError):
    """The other side gave another piece than the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A piece of an object."""

    offset: int
    size_bytes: int


class Download:
    """The bytes from `start` to `size_bytes` of an object.

    Pieces are asked for in order and may come in any; they are handed on in order. What is asked for and what waits for
    an earlier piece never exceed the window together (a single piece is always allowed).
    """

    def __init__(self, size_bytes: int, chunk_bytes: int, start: int = 0) -> None:
        if not 0 <= start <= size_bytes:
            raise PieceError(f"an object of {size_bytes} bytes has no byte {start}")
        self.size_bytes = size_bytes
        self.position = start
        """All before it was handed on."""
        self._chunk = chunk_bytes
        self._next = start
        self._under_way: set[Ask] = set()
        self._early: dict[int, bytes] = {}

    @property
    def done(self) -> bool:
        """All was handed on."""
        return self.position == self.size_bytes

    def asks(self, window_bytes: int) -> list[Ask]:
        """What to ask for now; each is under way until it has arrived or was lost."""
        found: list[Ask] = []
        while self._next < self.size_bytes:
            ask = Ask(self._next, min(self._chunk, self.size_bytes - self._next))
            taken = self._next - self.position
            if taken and taken + ask.size_bytes > window_bytes:
                break
            self._next += ask.size_bytes
            self._under_way.add(ask)
            found.append(ask)
        return found

    def arrived(self, ask: Ask, data: bytes) -> list[bytes]:
        """A piece has come; what can be handed on now. Raises PieceError for one that does not fit."""
        if ask not in self._under_way:
            raise PieceError(f"bytes from {ask.offset} on came without having been asked for")
        if len(data) != ask.size_bytes:
            raise PieceError(f"{len(data)} bytes came from {ask.offset} on, {ask.size_bytes} were asked for")
        self._under_way.discard(ask)
        self._early[ask.offset] = data
        ready: list[bytes] = []
        while (piece := self._early.pop(self.position, None)) is not None:
            self.position += len(piece)
            ready.append(piece)
        return ready


class Upload:
    """An object of `size_bytes` on its way to one who takes pieces in order only, and says after each what it has.

    `staged`: what it had before. If it says that it has less than it was sent, it has lost something: when nothing is
    under way any more, the sending begins again there.
    """

    def __init__(self, size_bytes: int, chunk_bytes: int, staged: int = 0) -> None:
        self.size_bytes = size_bytes
        self.staged = 0
        self._chunk = chunk_bytes
        self._next = 0
        self._under_way: set[Ask] = set()
        self._rewind = False
        self.begin(staged)

    @property
    def done(self) -> bool:
        """The other side has all."""
        return self.staged == self.size_bytes and not self._under_way

    def begin(self, staged: int) -> None:
        """The other side has so much; what was under way is not any more."""
        if not 0 <= staged <= self.size_bytes:
            raise PieceError(f"{staged} bytes are there of an object of {self.size_bytes}")
        self.staged = self._next = staged
        self._under_way.clear()
        self._rewind = False

    def asks(self, window_bytes: int) -> list[Ask]:
        """What to send now."""
        if self._rewind:
            if self._under_way:
                return []
            self.begin(self.staged)
        found: list[Ask] = []
        while self._next < self.size_bytes:
            ask = Ask(self._next, min(self._chunk, self.size_bytes - self._next))
            flying = sum(each.size_bytes for each in self._under_way)
            if flying and flying + ask.size_bytes > window_bytes:
                break
            self._next += ask.size_bytes
            self._under_way.add(ask)
            found.append(ask)
        return found

    def answered(self, ask: Ask, staged: int) -> None:
        """The other side has taken a piece, or not, and has so many bytes now."""
        if ask not in self._under_way:
            raise PieceError(f"an answer to the bytes from {ask.offset} on, which were not sent")
        if not 0 <= staged <= self.size_bytes:
            raise PieceError(f"{staged} bytes are said to be there of an object of {self.size_bytes}")
        self._under_way.discard(ask)
        self._rewind = self._rewind or staged < ask.offset + ask.size_bytes
        self.staged = staged if self._rewind else max(self.staged, staged)
        self._next = max(self._next, self.staged)  # an earlier try's pieces came late

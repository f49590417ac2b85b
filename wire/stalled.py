"""Connections that libzmq reads no more, though it says nothing of it. Pure: connections are numbers.

When libzmq refuses a message on a connection that stands (repeated or changed on the way), it tells its monitor why;
and telling that, it may forget that there was an error, and then waits for room that it has already. Nothing more is
read there, and the other side's TCP sees nothing wrong. No event names the connection. Rules:

- Whoever stood when such an event came is a suspect. One that closes, or of which more is read, is none any longer.
- One where something has been unread for two looks, while nothing was read, is to be ended: its owner dials again.
  Should it have been a busy one after all, its link repeats what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

Read = Callable[[int], tuple[int, int] | None]
"""Bytes read from a connection so far, and bytes that wait to be read; None if it's no connection any more."""


class Suspects:
    """See the module."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[int, bool]] = {}  # what was read when it came under suspicion; something waits

    def __len__(self) -> int:
        return len(self._read)

    def suspect(self, connections: Iterable[int], read: Read) -> bool:
        """One of these may have stalled just now; whether there is any suspect."""
        for connection in connections:
            if connection not in self._read and (found := read(connection)) is not None:
                self._read[connection] = (found[0], False)
        return bool(self._read)

    def drop(self, connection: int) -> None:
        """It has closed; another one may have its number later."""
        self._read.pop(connection, None)

    def look(self, read: Read) -> list[int]:
        """The connections to end."""
        ended = []
        for connection, (before, waited) in list(self._read.items()):
            found = read(connection)
            if found is None or found[0] != before:
                del self._read[connection]
            elif found[1] and waited:
                del self._read[connection]
                ended.append(connection)
            else:
                self._read[connection] = (before, bool(found[1]))
        return ended

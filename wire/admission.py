"""Who is let in: the allow-list of a process. Pure: the time (wall clock) is passed in.

Rules:

- A key that is not on the list is nobody. One id has one key, and one key one id.
- The list is replaced as a whole by one of a higher version; an older one changes nothing.
- `pin` adds what this process knows by itself (its orchestrator, from the token): no list takes it away.
- An entry may end at a time (`until`). Whoever asks, asks about now; so an end needs no timer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from wire.errors import RemoteError
from wire.ids import is_id
from wire.keys import fingerprint, is_key
from wire.messages import Admitted
from wire.roles import ROLES

MAX_ENTRIES = 8192
LOG_EVERY_S = 60.0
LOGGED_KEYS = 1024
LOG_LINES = 60
"""Lines about refusals within `LOG_EVERY_S`, whoever they are about: a log is not to be filled by strangers."""


class ListError(RemoteError):
    """An allow-list that contradicts itself."""


class Admission:
    """See the module. `watch` is told of every change."""

    def __init__(self, entries: Iterable[Admitted] = (), version: int = 0) -> None:
        self.version = version
        self._listed = _by_key(entries)
        self._pinned: dict[str, Admitted] = {}
        self._all: dict[str, Admitted] = dict(self._listed)
        self._watchers: list[Callable[[], None]] = []

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call this after each change."""
        self._watchers.append(watcher)

    def entries(self) -> list[Admitted]:
        """The list, without what is pinned."""
        return list(self._listed.values())

    def replace(self, version: int, entries: Iterable[Admitted]) -> bool:
        """Take a newer list; False if it's not newer. Raises `ListError` and changes nothing."""
        if version <= self.version:
            return False
        self._listed = _by_key(entries)
        self.version = version
        self._changed()
        return True

    def pin(self, entry: Admitted) -> None:
        """Let this one in, whatever the list says; instead of whoever was pinned under its id."""
        _check(entry)
        self._pinned = {key: other for key, other in self._pinned.items() if other.id != entry.id}
        self._pinned[entry.key] = entry
        self._changed()

    def _changed(self) -> None:
        taken = {entry.id for entry in self._pinned.values()}
        listed = {key: entry for key, entry in self._listed.items() if entry.id not in taken}
        self._all = listed | self._pinned
        for watcher in self._watchers:
            watcher()

    def find(self, key: str, now: float) -> Admitted | None:
        """The entry of a key at this time."""
        entry = self._all.get(key)
        if entry is None or (entry.until and now >= entry.until):
            return None
        return entry

    def refusal(self, key: str, name: str, now: float) -> str:
        """Why nobody with this key may speak as `name`; "" if he may."""
        entry = self._all.get(key)
        if entry is None:
            return "its key is not admitted"
        if entry.until and now >= entry.until:
            return f"the admission of {entry.id} has ended"
        if entry.id != name:
            return f"its key belongs to {entry.id}"
        return ""


class RefusalLog:
    """Which refusals are worth a line: each subject once in `LOG_EVERY_S`, all together `LOG_LINES`."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, float] = OrderedDict()
        self._since = 0.0
        self._lines = 0
        self._silent = 0
        self.refused = 0

    def line(self, subject: str, text: str, now: float) -> str:
        """What to write about this refusal; "" for nothing."""
        self.refused += 1
        if now - self._since >= LOG_EVERY_S:
            self._since, self._lines = now, 0
        if self._lines >= LOG_LINES or now - self._told.get(subject, -LOG_EVERY_S) < LOG_EVERY_S:
            self._silent += 1
            return ""
        self._told[subject] = now
        self._told.move_to_end(subject)
        while len(self._told) > LOGGED_KEYS:
            self._told.popitem(last=False)
        self._lines += 1
        untold, self._silent = self._silent, 0
        return f"{text} ({untold} refusals since the last line were not told)" if untold else text


def _by_key(entries: Iterable[Admitted]) -> dict[str, Admitted]:
    found: dict[str, Admitted] = {}
    ids: dict[str, str] = {}
    for entry in entries:
        _check(entry)
        if entry.key in found:
            raise ListError(f"key {fingerprint(entry.key)} is on the list twice: {found[entry.key].id} and {entry.id}")
        if entry.id in ids:
            raise ListError(f"id {entry.id} is on the list twice, with different keys")
        found[entry.key] = entry
        ids[entry.id] = entry.key
        if len(found) > MAX_ENTRIES:
            raise ListError(f"an allow-list of more than {MAX_ENTRIES} entries")
    return found


def _check(entry: Admitted) -> None:
    if not is_key(entry.key):
        raise ListError(f"the key of {entry.id[:63]!r} on the list is no key")
    if not is_id(entry.id):
        raise ListError(f"{entry.id[:63]!r} on the list is no id")
    if entry.role not in ROLES:
        raise ListError(f"role {entry.role[:20]!r} of {entry.id}; roles are {', '.join(ROLES)}")

"""The registry: an SQLite index of networks, VNodes, PNodes, placements, sessions and events, keyed by network id.

It is no truth: `rebuild` fills it from the records in the store, and it is rebuilt whenever its file is missing,
damaged, of another cluster, or of another version. Only the event logs and the reports of steps live here alone; a lost
index loses history, never state. All calls are short and made in the event loop's thread.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from orchestrator.records import NetworkRecord, SessionRecord
from wire.messages import PeerRef, SessionEvent

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE networks (network TEXT PRIMARY KEY, digest TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE vnodes (network TEXT NOT NULL, place INTEGER NOT NULL, vnode TEXT NOT NULL, type TEXT NOT NULL,
  parameters INTEGER NOT NULL, PRIMARY KEY (network, vnode));
CREATE TABLE pnodes (pnode TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, addresses TEXT NOT NULL,
  state TEXT NOT NULL, seen REAL NOT NULL);
CREATE TABLE sessions (session TEXT PRIMARY KEY, network TEXT NOT NULL, state TEXT NOT NULL, body BLOB NOT NULL);
CREATE TABLE placements (session TEXT NOT NULL, epoch INTEGER NOT NULL, vnode TEXT NOT NULL, pnode TEXT NOT NULL,
  PRIMARY KEY (session, epoch, vnode)) WITHOUT ROWID;
CREATE TABLE events (session TEXT NOT NULL, seq INTEGER NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (session, seq)) WITHOUT ROWID;
"""


Write = TypeVar("Write", bound=Callable[..., None])


def _index_only(write: Write) -> Write:
    """A write that fails (disk full, say) costs part of the index, never the service: it is counted and told."""

    @functools.wraps(write)
    def tried(self: Registry, *args: Any, **kwargs: Any) -> None:
        try:
            write(self, *args, **kwargs)
        except sqlite3.Error as error:
            self.failed += 1
            self.problem = f"{write.__name__}: {error}"

    return cast("Write", tried)


class Registry:
    """The index in one file; see the module's docstring. `fresh`: it has to be rebuilt from the store."""

    def __init__(self, path: Path, cluster: str) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.fresh = False
        self.damaged = ""
        self.failed = 0
        self.problem = ""
        try:
            self._db = self._open()
            known = self._meta()
        except sqlite3.DatabaseError as error:
            self.damaged = str(error)
            known = {}
        if known != {"version": str(SCHEMA_VERSION), "cluster": cluster}:
            self._begin_anew(cluster)

    def close(self) -> None:
        """Write what is open and close the file. Idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._db.commit()
            self._db.close()

    def commit(self) -> None:
        """Make all changes since the last call durable."""
        try:
            if self._db.in_transaction:
                self._db.commit()
        except sqlite3.Error as error:
            self.failed += 1
            self.problem = f"commit: {error}"

    # ------------------------------------------------------------ networks

    @_index_only
    def put_network(self, record: NetworkRecord, vnodes: Iterable[tuple[str, str, int]] = ()) -> None:
        """Enter a network; `vnodes`: (VNode, type, parameters) in topological order."""
        body = msgspec.json.encode(record)
        self._db.execute("REPLACE INTO networks VALUES (?, ?, ?)", (record.network, record.digest, body))
        rows = [(record.network, place, *line) for place, line in enumerate(vnodes)]
        if rows:
            self._db.execute("DELETE FROM vnodes WHERE network = ?", (record.network,))
            self._db.executemany("INSERT INTO vnodes VALUES (?, ?, ?, ?, ?)", rows)
        self.commit()

    def networks(self) -> list[NetworkRecord]:
        """All networks, by id."""
        rows = self._db.execute("SELECT body FROM networks ORDER BY network")
        return [msgspec.json.decode(row[0], type=NetworkRecord) for row in rows]

    def vnodes(self, network: str) -> list[tuple[str, str, int]]:
        """(VNode, type, parameters) of a network in topological order."""
        query = "SELECT vnode, type, parameters FROM vnodes WHERE network = ? ORDER BY place"
        return [(str(row[0]), str(row[1]), int(row[2])) for row in self._db.execute(query, (network,))]

    @_index_only
    def drop_network(self, network: str) -> None:
        """Forget a network."""
        self._db.execute("DELETE FROM networks WHERE network = ?", (network,))
        self._db.execute("DELETE FROM vnodes WHERE network = ?", (network,))
        self.commit()

    # ------------------------------------------------------------ sessions

    @_index_only
    def put_session(self, record: SessionRecord) -> None:
        """Enter a session as it is now."""
        row = (record.session, record.network, record.state, msgspec.json.encode(record))
        self._db.execute("REPLACE INTO sessions VALUES (?, ?, ?, ?)", row)
        self.commit()

    def sessions(self) -> list[SessionRecord]:
        """All sessions, by id."""
        rows = self._db.execute("SELECT body FROM sessions ORDER BY session")
        return [msgspec.json.decode(row[0], type=SessionRecord) for row in rows]

    @_index_only
    def put_placement(self, session: str, epoch: int, placement: Mapping[str, str]) -> None:
        """Enter where an epoch's VNodes are; earlier epochs are forgotten."""
        self._db.execute("DELETE FROM placements WHERE session = ?", (session,))
        rows = [(session, epoch, vnode, pnode) for vnode, pnode in placement.items()]
        self._db.executemany("INSERT INTO placements VALUES (?, ?, ?, ?)", rows)
        self.commit()

    def placement(self, session: str) -> dict[str, str]:
        """Where the VNodes of the newest epoch are, or were."""
        query = "SELECT vnode, pnode FROM placements WHERE session = ?"
        return {str(row[0]): str(row[1]) for row in self._db.execute(query, (session,))}

    @_index_only
    def drop_session(self, session: str) -> None:
        """Forget a session, its placement and its events."""
        for table in ("sessions", "placements", "events"):
            self._db.execute(f"DELETE FROM {table} WHERE session = ?", (session,))
        self.commit()

    # ------------------------------------------------------------ PNodes and events

    @_index_only
    def put_pnode(self, pnode: str, incarnation: int, peer: PeerRef, state: str, seen: float) -> None:
        """Enter a PNode. `seen`: wall clock."""
        row = (pnode, incarnation, " ".join(peer.addresses), state, seen)
        self._db.execute("REPLACE INTO pnodes VALUES (?, ?, ?, ?, ?)", row)

    def incarnations(self) -> dict[str, int]:
        """The incarnations entered, by PNode."""
        return {str(row[0]): int(row[1]) for row in self._db.execute("SELECT pnode, incarnation FROM pnodes")}

    @_index_only
    def put_events(self, session: str, events: Sequence[SessionEvent], *, rewrite: bool) -> None:
        """Add events to a session's log, or with `rewrite` replace the whole log. `commit` makes it durable."""
        if rewrite:
            self._db.execute("DELETE FROM events WHERE session = ?", (session,))
        rows = [(session, event.seq, msgspec.msgpack.encode(event)) for event in events]
        self._db.executemany("REPLACE INTO events VALUES (?, ?, ?)", rows)

    def events(self, session: str) -> list[SessionEvent]:
        """A session's log, oldest first."""
        rows = self._db.execute("SELECT body FROM events WHERE session = ? ORDER BY seq", (session,))
        return [msgspec.msgpack.decode(row[0], type=SessionEvent) for row in rows]

    def rebuild(self, networks: Iterable[NetworkRecord], sessions: Iterable[SessionRecord]) -> None:
        """Make networks and sessions those of the store; what the store does not have is dropped."""
        networks, sessions = list(networks), list(sessions)
        for gone in {record.network for record in self.networks()} - {record.network for record in networks}:
            self.drop_network(gone)
        for gone in {record.session for record in self.sessions()} - {record.session for record in sessions}:
            self.drop_session(gone)
        for network in networks:
            self.put_network(network)
        for session in sessions:
            self.put_session(session)
        self.fresh = False

    # ------------------------------------------------------------ inside

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, isolation_level="DEFERRED")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA busy_timeout = 2000")
        return db

    def _meta(self) -> dict[str, str]:
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return {}
        if self._db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("the file is malformed")
        return {str(row[0]): str(row[1]) for row in self._db.execute("SELECT key, value FROM meta")}

    def _begin_anew(self, cluster: str) -> None:
        """Put the old file aside, if there is one that says anything, and make an empty index."""
        with contextlib.suppress(AttributeError):
            self._db.close()
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        if self.damaged and self._path.exists():
            self._path.replace(self._path.with_name(self._path.name + ".damaged"))
        self._path.unlink(missing_ok=True)
        self._db = self._open()
        self._db.executescript(_SCHEMA)
        meta = {"version": str(SCHEMA_VERSION), "cluster": cluster}
        self._db.executemany("INSERT INTO meta VALUES (?, ?)", list(meta.items()))
        self._db.commit()
        self.fresh = True


def cluster_of(path: Path) -> str:
    """Of which cluster the index in that file is, "" if there is none that says so."""
    if not path.exists():
        return ""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
            found = db.execute("SELECT value FROM meta WHERE key = 'cluster'").fetchone()
    except sqlite3.Error:
        return ""
    return str(found[0]) if found is not None else ""

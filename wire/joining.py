"""How a process with a token becomes a member: it knocks with the token's key and is admitted with a key of its own.

What it learns is kept beside its key (`<home>/keys/cluster.json`), so that it needs the token once.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from wire.admission import Admission
from wire.errors import BadFileError, DCNRError, RemoteError, UsageError
from wire.ids import checked_id, new_request_id
from wire.keys import KeyPair, fingerprint, load_or_make
from wire.messages import Admitted, Join, Joined, PeerRef
from wire.roles import ORCHESTRATOR
from wire.tokens import Token
from wire.zmq_bus import ZmqBus

CLUSTER_FILE = Path("keys") / "cluster.json"
JOIN_S, KNOWN_S = 20.0, 5.0


class Acquaintance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a member knows of its cluster: who it is there, and where the orchestrator is, with which key."""

    id: str
    role: str
    orchestrator: str
    addresses: list[str]
    key: str

    def peer(self) -> PeerRef:
        """The orchestrator."""
        return PeerRef(self.orchestrator, 0, self.addresses, self.key)

    def admission(self) -> Admission:
        """Its own allow-list, before it has got one: the orchestrator is let in."""
        found = Admission()
        found.pin(Admitted(self.key, self.orchestrator, ORCHESTRATOR))
        return found


def guest_id(public: str) -> str:
    """Under which id one knocks whose only key is a token's."""
    return f"join-{fingerprint(public).replace('-', '')}"


def client_id(public: str) -> str:
    """Under which id a command line with this key speaks."""
    return f"cli-{fingerprint(public).replace('-', '')}"


def remembered(home: Path) -> Acquaintance | None:
    """What is kept in a home folder. Raises `BadFileError`."""
    file = home / CLUSTER_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Acquaintance)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise BadFileError(f"{file} can't be read: {error}", hint="delete it, and join anew") from error


def remember(home: Path, found: Acquaintance) -> None:
    """Keep it, whole or not at all."""
    file = home / CLUSTER_FILE
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as opened:
        opened.write(msgspec.json.encode(found))
    partial.replace(file)


async def join(home: Path, token: Token, name: str) -> tuple[KeyPair, Acquaintance]:
    """Be admitted as `name`, and keep what was learnt. Who is a member already stays one, should the token have ended.

    Raises `UsageError`, `wire.requests.RefusedError`, `UnreachableError`, `KeyFileError`.
    """
    checked_id(name, "name")
    keys, known = load_or_make(home), remembered(home)
    member = known is not None and known.key == token.server_key and known.id == name
    try:
        found = await _knock(token, name, keys.public, KNOWN_S if member else JOIN_S)
    except DCNRError:
        if known is None or not member:
            raise
        return keys, known
    remember(home, found)
    return keys, found


async def _knock(token: Token, name: str, public: str, limit_s: float) -> Acquaintance:
    if token.until and time.time() >= token.until:
        raise UsageError("the token has ended", hint="dcnr node invite makes another")
    admission = Admission()
    admission.pin(Admitted(token.server_key, token.orchestrator, ORCHESTRATOR))
    bus = ZmqBus(guest_id(token.pair.public), keys=token.pair, admission=admission)
    await bus.start()
    try:
        there = PeerRef(token.orchestrator, 0, list(token.addresses), token.server_key)
        answer, _ = await bus.ask(there, Join(str(new_request_id()), name, public), timeout_s=limit_s)
    finally:
        await bus.close()
    if not isinstance(answer, Joined):
        raise RemoteError(f"the orchestrator answered {type(answer).__name__} to Join")
    return Acquaintance(checked_id(answer.id), answer.role, token.orchestrator, list(token.addresses), token.server_key)

"""What the orchestrator stores about networks and sessions, as small JSON objects in the store.

They are the truth; the SQLite registry is an index of them. Layout: `registry/networks/<network>.json`,
`registry/sessions/<session>.json`, `registry/term.json`, `registry/incarnations.json`, `registry/epochs.json`.
"""

from __future__ import annotations

import msgspec

from storage.keys import check_id
from wire.messages import CodedEdges

REGISTRY_PREFIX = "registry/"


class NetworkRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network in the registry; its bytes are the blob `digest`."""

    network: str
    digest: str
    vnodes: int
    parameters: int
    created: float
    trainable: bool = True
    graph_digest: str = ""
    """Of the bytes without recipe and pins: two of one id and graph are versions of one network."""
    version: int = 1


class SessionRecord(msgspec.Struct, forbid_unknown_fields=True):
    """A session: what it was asked to be, and where it stands. Written at each change of state and each deployment."""

    session: str
    network: str
    network_digest: str
    data_digest: str
    tokenizer_digest: str
    data: str
    steps: int
    seed: int
    checkpoint_every: int
    keep: int
    trace: bool
    tag: str
    created: float
    request_id: str = ""
    until: int = 0
    pnodes: int = 0
    wanted: dict[str, str] = {}
    state: str = "created"
    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    committed: int = 0
    final_hash: str = ""
    error: str = ""
    hint: str = ""
    bit_exact: str = ""
    placement: dict[str, str] = {}
    """Of the present epoch, so that another orchestrator can take the run over."""
    incarnations: dict[str, int] = {}
    loss_pnode: str = ""
    start_step: int = 0
    recoveries: int = 0
    codecs: list[CodedEdges] | None = None
    """The edges that its numbers are coded on, chosen when it was first placed; None before that."""
    hold: bool = False
    """A pause was asked for while it starts: it holds as soon as it runs."""
    term: int = 0
    """Of the orchestrator that wrote it: a new one writes each record at once, so that the former one's writes fail."""
    version: int = 1


class IncarnationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The highest incarnation granted, by PNode, and the term of who wrote it."""

    granted: dict[str, int]
    term: int = 0
    version: int = 1


class EpochsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last epoch of each deleted session: one of the same id goes on from there, so no epoch is used twice."""

    last: dict[str, int]
    version: int = 1


INCARNATIONS_KEY = f"{REGISTRY_PREFIX}incarnations.json"
EPOCHS_KEY = f"{REGISTRY_PREFIX}epochs.json"
NETWORKS_PREFIX = f"{REGISTRY_PREFIX}networks/"
SESSIONS_PREFIX = f"{REGISTRY_PREFIX}sessions/"


def network_key(network: str) -> str:
    """Where a network's record is."""
    return f"{NETWORKS_PREFIX}{check_id(network, 'network id')}.json"


def session_key(session: str) -> str:
    """Where a session's record is."""
    return f"{SESSIONS_PREFIX}{check_id(session, 'session id')}.json"

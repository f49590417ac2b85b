"""Which role may send which message. Checked on each message before its handler, wherever there are keys.

A PNode can't act as a client, a client not as a PNode, and whoever only has a token can do nothing but join. PNodes and
clients ask a storage service, which answers and asks nobody.
"""

from __future__ import annotations

from wire import messages as m
from wire.messages import Message

ORCHESTRATOR, PNODE, CLIENT, JOIN, STORAGE = "orchestrator", "pnode", "client", "join", "storage"
ROLES = (ORCHESTRATOR, PNODE, CLIENT, JOIN, STORAGE)

_ANSWERS: tuple[type[Message], ...] = (m.Ok, m.Refused)

_OF_THE_STORE: tuple[type[Message], ...] = (
    *(m.OpenStore, m.ProbeStore, m.StoreRead, m.StoreHead, m.StoreList),
    *(m.StorePut, m.StoreBegin, m.StoreAppend, m.StoreFinish, m.StoreDelete),
)

_OF_ORCHESTRATOR: tuple[type[Message], ...] = (
    *_ANSWERS,
    *(m.Registered, m.HeartbeatAck, m.ReportNow, m.Joined, m.Members),
    *(m.Prepare, m.StartRun, m.HoldRun, m.Release, m.InspectRun, m.Committed),
)

_OF_PNODE: tuple[type[Message], ...] = (
    *_ANSWERS,
    *(m.Register, m.Heartbeat, m.Goodbye),
    *(m.Progress, m.PartsSaved, m.RunHeld, m.RunFailed),
    *(m.Hop, m.TieGradient, m.TieVersion, m.GradientReport, m.Verdict),
    *(m.InferHop, m.InferOutput, m.InferFailed),
    *(m.RelayOpen, m.RelayTicket),
    *_OF_THE_STORE,
)

_OF_CLIENT: tuple[type[Message], ...] = (
    *(m.AskCluster, m.ListPNodes, m.ListNetworks, m.ListSessions, m.ListMembers),
    *(m.PutNetwork, m.PlanNetwork, m.RemoveNetwork),
    *(m.CreateSession, m.ActOnSession, m.Rebalance, m.WatchSession, m.AskDeployment, m.InspectSession),
    *(m.InferInput, m.InferEnd),
    *(m.CollectGarbage, m.Invite, m.Revoke, m.ShutDown),
    *_OF_THE_STORE,
)

MAY_SEND: dict[str, frozenset[type[Message]]] = {
    ORCHESTRATOR: frozenset(_OF_ORCHESTRATOR),
    PNODE: frozenset(_OF_PNODE),
    CLIENT: frozenset(_OF_CLIENT),
    JOIN: frozenset({m.Join}),
    STORAGE: frozenset({*_ANSWERS, m.StoreChunk}),
}


def may_send(role: str, message: Message) -> bool:
    """Whether someone of this role may send such a message."""
    return type(message) in MAY_SEND.get(role, frozenset())

"""Every message that crosses a process border, as typed structs.

A message is a frozen msgspec struct that travels as a msgpack array `[tag, field, field, …]`; tensors and large bodies
travel beside it as raw frames. Rules:

- Fields are only ever appended, with a default, so that an older peer can still read a newer one's message.
- `request_id` names an exchange: the answer carries the same id, and a request asked again under its id is answered
  from the first answer, never carried out twice.
- `session`, `epoch`: which placement of which run is meant; a message of another epoch is refused (DESIGN 1, 10).
- Times are seconds (`_s`), sizes bytes (`_bytes`), digests lower-case hex SHA-256.

docs/protocol.md describes each of them; a test keeps it complete.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

CONTROL, BACKWARD, FORWARD = 0, 1, 2
LANES = (CONTROL, BACKWARD, FORWARD)

DIRECTION_FORWARD, DIRECTION_BACKWARD = 0, 1


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. `lane` is the default lane a message travels on."""

    lane: ClassVar[int] = CONTROL


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one raw frame holds: torch's short dtype name and the shape (row-major, contiguous).

    With a codec the frame holds the tensor coded; dtype and shape are those of the tensor that comes out.
    """

    dtype: str
    shape: list[int]
    codec: str = ""  # "" or the edge's: bf16, int8


class PeerRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A process on the bus: its name, the number it drew at start (0: not known yet), where it can be dialled.

    `key`: its public key in Z85, "" where there are no keys. Of a sender it is the one that its connection proved.
    """

    id: str
    boot: int = 0
    addresses: list[str] = []
    key: str = ""


class Admitted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One entry of an allow-list: a public key, whose it is, and what it may do (wire/roles.py)."""

    key: str
    id: str
    role: str
    until: float = 0.0  # wall clock; 0: for good
    uses: int = 0  # of role "join": how often it may still join; -1: any number
    grants: str = ""  # of role "join": what the joiner becomes


# ---------------------------------------------------------------- answers to any request


class Ok(Message, tag="ok", frozen=True):
    """The request was carried out. A body, where there is one, is frame 0: msgpack of the type that docs name."""

    request_id: str


class Refused(Message, tag="refused", frozen=True):
    """The request was not carried out: a stable code, a sentence for a person, and the next step."""

    request_id: str
    code: str
    text: str
    hint: str = ""


# ---------------------------------------------------------------- membership: PNode <-> orchestrator


class Profile(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a PNode measured about itself at start."""

    host: str
    device: str
    threads: int
    flops: float  # float32 multiply-adds count as two, per second, at `threads` threads
    memory_bytes: int
    link_bytes_s: float  # to a peer on the same link; loopback unless measured
    link_latency_s: float
    torch: str  # version and build
    cpu: str
    version: str  # of DCNR


class Register(Message, tag="register", frozen=True):
    """A PNode asks to be a member. `nonce` is its boot number; `held` the incarnation it had before, or 0."""

    request_id: str
    pnode: str
    peer: PeerRef
    profile: Profile
    held: int = 0


class Registered(Message, tag="registered", frozen=True):
    """The PNode is a member: its incarnation, the orchestrator's term, its lease, the store and cluster id."""

    request_id: str
    incarnation: int
    term: int
    lease_s: float
    report_every_s: float
    store: str
    cluster: str


class SessionBeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One session in a heartbeat: the last step applied here, and what it waits for ("" if it computes)."""

    session: str
    epoch: int
    step: int
    state: str
    waiting_for: str
    waiting_s: float
    moved: int = 0  # grows with every step, and with every byte fetched while state is "preparing"
    uncommitted: list[int] = []  # cuts that are in the store, as far as this PNode goes, and not known as committed
    limit_s: float = 0.0  # it waits so long at most


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """Every 2 s: the PNode lives; how it is; what each of its sessions does."""

    pnode: str
    incarnation: int
    term: int
    sessions: list[SessionBeat]
    rss_bytes: int
    loop_lag_s: float
    compute: str  # "idle", "busy", "stalled", "dead"
    compute_s: float  # how long the running action has taken so far
    heard: list[PeerRef] = []  # processes of other PNodes from which anything came since the last report


class HeartbeatAck(Message, tag="heartbeat_ack", frozen=True):
    """`known` false: register again."""

    incarnation: int
    term: int
    known: bool


class ReportNow(Message, tag="report_now", frozen=True):
    """Report at once: another PNode's connection closed, and from whom this one hears decides what that means."""


class Goodbye(Message, tag="goodbye", frozen=True):
    """The PNode ends in good order."""

    pnode: str
    incarnation: int


# ---------------------------------------------------------------- deployment and runs: orchestrator -> PNode


class Prepare(Message, tag="prepare", frozen=True):
    """First phase: build the VNodes of this epoch (and load their state), but start nothing.

    Frame 0 holds the `Deployment` (msgpack), which may be larger than a header.
    """

    request_id: str
    session: str
    epoch: int
    replica: int
    term: int


class CodedEdges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One value's way to some of its readers, coded: indices of edges in the network's order."""

    codec: str
    edges: list[int]


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a PNode needs to run its share of a session; the body of `Prepare`."""

    session: str
    network: str  # network id
    network_digest: str  # blob: networks.Network.to_bytes()
    placement: dict[str, str]  # VNode -> PNode
    peers: dict[str, PeerRef]  # PNode -> where it is
    incarnations: dict[str, int]
    orchestrator: PeerRef
    data_digest: str  # blob: packed data set, "" if the session can't train
    tokenizer_digest: str  # blob, "" if none
    steps: int  # length of the whole run: schedules end here
    seed: int
    start_step: int  # steps already applied
    manifest_digest: str  # checkpoint to load, "" to initialise
    manifest_key: str
    store_prefix: str  # of the session: parts and manifests go below it
    checkpoint_every: int  # 0: only at the end and on demand
    trace: bool = False  # write parameters and gradients of every step below store_prefix (dcnr verify)
    max_uncommitted: int = 10  # cuts made and not known as committed, above which training waits
    codecs: list[CodedEdges] = []  # edges that are coded, whether they cross PNodes in this placement or not
    relays: list[PeerRef] = []  # through whom members reach each other that can only dial


class StartRun(Message, tag="start_run", frozen=True):
    """Second phase: run until `until` steps are applied (or the next hold), then hold."""

    request_id: str
    session: str
    epoch: int
    term: int
    until: int


class HoldRun(Message, tag="hold_run", frozen=True):
    """To the PNode of the loss: let the next verdict say hold (and save, for a checkpoint there)."""

    request_id: str
    session: str
    epoch: int
    term: int
    save: bool


class Release(Message, tag="release", frozen=True):
    """Forget this session's VNodes and free their memory."""

    request_id: str
    session: str
    epoch: int
    term: int


class InspectRun(Message, tag="inspect_run", frozen=True):
    """Ask a PNode about its VNodes. Ok's body: list[VNodeReport]."""

    request_id: str
    session: str
    epoch: int


class VNodeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One VNode as it is now, for `dcnr inspect`."""

    vnode: str
    type: str
    pnode: str
    stage: int
    step: int
    parameters: dict[str, list[int]]
    parameter_count: int
    weight_norm: float
    gradient_norm: float  # of the last applied step, before clipping
    forward_s: float  # mean per microbatch over the last step measured
    backward_s: float
    bytes_out: int  # sent to other PNodes since start, both directions


# ---------------------------------------------------------------- data plane: PNode <-> PNode


class Hop(Message, tag="hop", frozen=True):
    """One activation (forward) or its gradient (backward) of one microbatch on one channel; tensors are the frames.

    Known by (session, epoch, replica, step, microbatch, channel, direction). A backward hop answers the forward hop's
    `request_id`; with no tensors where no gradient is needed. `count`: targets of the microbatch, from the loss stage
    backwards.
    """

    lane: ClassVar[int] = FORWARD
    session: str
    epoch: int
    replica: int
    step: int
    microbatch: int
    channel: int
    direction: int
    request_id: int
    reply_to: str  # the sender's PNode id
    count: int
    tensors: list[TensorMeta]


class TieGradient(Message, tag="tie_gradient", frozen=True):
    """The gradient that one other use of a tied parameter gathered over a step; to the parameter's owner."""

    lane: ClassVar[int] = BACKWARD
    session: str
    epoch: int
    replica: int
    step: int
    user: str  # the VNode that uses the parameter
    count: int
    tensors: list[TensorMeta]


class TieVersion(Message, tag="tie_version", frozen=True):
    """The owner's parameter after U(step), to a PNode that uses it."""

    lane: ClassVar[int] = FORWARD
    session: str
    epoch: int
    replica: int
    step: int
    owner: str
    tensors: list[TensorMeta]


class GradientReport(Message, tag="gradient_report", frozen=True):
    """Squared gradient norms of one step, one per trainable tensor, and whether all is finite; to the loss's PNode.

    Frame 0 is msgpack of list[tuple[int, float]], since a PNode may have more tensors than a header holds: index of the
    parameter in network order, sum of squares of its gradient summed over the microbatches.
    """

    session: str
    epoch: int
    replica: int
    step: int
    pnode: str
    finite: bool
    culprit: str  # first VNode in network order with a value that is not finite, or ""


class Verdict(Message, tag="verdict", frozen=True):
    """The loss's PNode decides U(step) for all: apply with this scale, or not at all.

    `scale` = clip coefficient / targets. `hold`: stop after this step. `save`: this step is a cut to save.
    """

    session: str
    epoch: int
    replica: int
    step: int
    apply: bool
    scale: float
    count: int
    gradient_norm: float
    hold: bool
    save: bool
    culprit: str


# ---------------------------------------------------------------- reports: PNode -> orchestrator


class StepReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One applied step as the loss's PNode saw it."""

    step: int  # 1 for the first
    loss: float  # mean per target
    count: int
    gradient_norm: float
    lr: float
    seconds: float  # since the previous update
    samples: int
    ids_digest: str  # digest of the sample ids of this step, "" if not traced


class Progress(Message, tag="progress", frozen=True):
    """Steps applied since the last report; sent at most every 0.2 s."""

    session: str
    epoch: int
    replica: int
    pnode: str
    steps: list[StepReport]


class PartsSaved(Message, tag="parts_saved", frozen=True):
    """This PNode's parts of the cut at `step` are in the store. Frame 0: msgpack of list[Part]."""

    session: str
    epoch: int
    replica: int
    step: int
    pnode: str
    environment: list[str]  # torch build, device kind, cpu, threads: what bit-exact resume depends on


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stored piece of a checkpoint: the state of one VNode."""

    vnode: str
    digest: str
    size_bytes: int


class Committed(Message, tag="committed", frozen=True):
    """Orchestrator -> PNodes: the cut at `step` is durable."""

    session: str
    epoch: int
    replica: int
    step: int


class RunHeld(Message, tag="run_held", frozen=True):
    """This PNode's share holds after `step`: the target was reached, or a verdict said hold."""

    session: str
    epoch: int
    replica: int
    step: int
    pnode: str


class RunFailed(Message, tag="run_failed", frozen=True):
    """The run can't go on here, and why."""

    session: str
    epoch: int
    replica: int
    step: int
    pnode: str
    vnode: str
    text: str
    hint: str
    cause: str = ""  # numbers, peer, compute, wait, store, input, defect
    peer: str = ""  # the PNode that could not be reached, for the cause "peer"


# ---------------------------------------------------------------- inference: client -> input stages -> … -> client


class InferInput(Message, tag="infer_input", frozen=True):
    """A forward request for the VNodes of one session. Sent by the client to every PNode that reads an input or gives
    an output.

    Either `inputs` names the frames (one tensor each) or `split` names rows of the session's own data
    ("train" | "val", first row `start`, `count` rows; see pnode.data). `position`: tokens already in the KV cache of
    `request_id` (0 starts anew); `cache`: keep keys and values for a next call. `outputs`: names of network outputs.
    """

    lane: ClassVar[int] = FORWARD
    request_id: str
    session: str
    sequence: int  # 0, 1, 2 … within the request
    reply_to: PeerRef
    outputs: list[str]
    inputs: list[str]
    tensors: list[TensorMeta]
    split: str = ""
    start: int = 0
    count: int = 0
    position: int = 0
    cache: bool = False


class InferHop(Message, tag="infer_hop", frozen=True):
    """An activation of a forward request on its way to another stage."""

    lane: ClassVar[int] = FORWARD
    request_id: str
    session: str
    epoch: int
    sequence: int
    channel: int
    step: int  # weights after this step made it
    tensors: list[TensorMeta]


class InferOutput(Message, tag="infer_output", frozen=True):
    """One output of the network for the client. `count`: targets, where the output is the loss."""

    lane: ClassVar[int] = BACKWARD
    request_id: str
    sequence: int
    output: str
    step: int
    count: int
    tensors: list[TensorMeta]


class InferFailed(Message, tag="infer_failed", frozen=True):
    """The request can't be answered, and why."""

    request_id: str
    sequence: int
    pnode: str
    vnode: str
    code: str
    text: str
    hint: str = ""


class InferEnd(Message, tag="infer_end", frozen=True):
    """The client is done: free this request's KV cache."""

    request_id: str
    session: str


# ---------------------------------------------------------------- client -> orchestrator
# The answer to each is Ok with the body named here (frame 0, msgpack of the struct), or Refused.


class ClusterInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The orchestrator about itself."""

    cluster: str
    version: str
    term: int
    store: str
    started: float  # wall clock, for display only
    pid: int
    damaged: list[str] = []  # what it found damaged in the store when it took over, and what became of it


class PNodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One PNode as the orchestrator knows it. state: alive, suspect, lost, gone."""

    pnode: str
    state: str
    incarnation: int
    peer: PeerRef
    profile: Profile
    seen_s: float  # seconds since its last sign of life
    sessions: list[str]
    vnodes: int
    rss_bytes: int
    loop_lag_s: float
    compute: str
    pid: int = 0
    health: str = ""  # "" or why it gets no VNodes: its compute thread died, hangs, …


class NetworkInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network in the registry."""

    network: str
    digest: str
    vnodes: int
    parameters: int
    sessions: list[str]
    created: float


class SessionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session as the orchestrator knows it. `waiting`: who is waited for, since when, as sentences.

    `error`: why it failed, or while it recovers why it has to.
    """

    session: str
    network: str
    state: str
    epoch: int
    step: int
    steps: int
    until: int
    loss: float
    tokens_s: float
    committed: int  # last durable step
    pnodes: list[str]
    created: float
    error: str
    hint: str
    waiting: list[str]
    deployed: bool
    bit_exact: str  # "" or "not bit-exact: …"
    final_hash: str  # of the last committed cut
    eta_s: float
    data: str = ""
    tokenizer_digest: str = ""
    data_digest: str = ""
    recoveries: int = 0  # placements made because something was lost
    codecs: str = ""  # "" or which codecs its edges have, for people


class SessionEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a session's event log; `steps` for kind "progress"."""

    seq: int
    time: float  # wall clock, for display only
    kind: str  # state, progress, committed, warning, error, placement, note
    text: str
    step: int
    steps: list[StepReport] = []


class DeploymentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a session's VNodes are; what a client needs for inference and inspection."""

    session: str
    network: str
    network_digest: str
    epoch: int
    placement: dict[str, str]
    peers: dict[str, PeerRef]
    tokenizer_digest: str
    data_digest: str
    step: int
    store: str
    codecs: list[CodedEdges] = []  # what a one-process run has to round in order to give the same numbers


class PlanInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A placement, its predicted step time, and why."""

    placement: dict[str, str]
    step_s: float
    compute_s: dict[str, float]  # by PNode, per step
    wire_bytes: dict[str, int]  # by "src -> dst", per step
    memory_bytes: dict[str, int]
    reasons: list[str]


class AskCluster(Message, tag="ask_cluster", frozen=True):
    """Body: ClusterInfo."""

    request_id: str


class ListPNodes(Message, tag="list_pnodes", frozen=True):
    """Body: list[PNodeInfo]."""

    request_id: str


class ListNetworks(Message, tag="list_networks", frozen=True):
    """Body: list[NetworkInfo]."""

    request_id: str


class ListSessions(Message, tag="list_sessions", frozen=True):
    """Body: list[SessionInfo]; of one network, or all ("")."""

    request_id: str
    network: str = ""


class PutNetwork(Message, tag="put_network", frozen=True):
    """Register a network under its id; frame 0 is `Network.to_bytes()`. Body: NetworkInfo.

    `replace` false: a different network under the same id is refused.
    """

    request_id: str
    network: str
    replace: bool = False


class PlanNetwork(Message, tag="plan_network", frozen=True):
    """Place a registered network without deploying it. `pnodes` 0: as many as are best. Body: PlanInfo."""

    request_id: str
    network: str
    pnodes: int = 0


class CreateSession(Message, tag="create_session", frozen=True):
    """Create a session and, with `start`, run it. Body: SessionInfo.

    `until` 0: to the end. `placement` empty: the planner's. `name` empty: `<network>-<n>`.
    """

    request_id: str
    network: str
    data_digest: str
    tokenizer_digest: str
    data: str  # what the data are, for people
    steps: int
    seed: int
    until: int = 0
    pnodes: int = 0
    placement: dict[str, str] = {}
    checkpoint_every: int = 0
    keep: int = 3
    start: bool = True
    trace: bool = False
    name: str = ""
    tag: str = ""  # free text kept with the session, such as "demo"


class ActOnSession(Message, tag="act_on_session", frozen=True):
    """action: start | pause | resume | stop | deploy | undeploy | remove. Body: SessionInfo.

    start, resume: run until `until` (0: to the end), from the last checkpoint where it isn't deployed.
    deploy: place and load it, to be used for inference. remove: delete it and what it stored.
    """

    request_id: str
    session: str
    action: str
    until: int = 0
    pnodes: int = 0
    placement: dict[str, str] = {}


class Rebalance(Message, tag="rebalance", frozen=True):
    """What the best placement on the PNodes of now would gain a deployed session. Body: RebalanceInfo.

    `apply`: also move there, at a cut of its own: hold, save, place anew, go on.
    """

    request_id: str
    session: str
    apply: bool = False


class RebalanceInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The present placement and the best one, both predicted for the PNodes of now; `moved`: VNode -> its new PNode."""

    session: str
    present: PlanInfo
    best: PlanInfo
    gain: float  # present step time / best step time
    moved: dict[str, str]
    moved_bytes: int  # state that has to be fetched
    applied: bool


class WatchSession(Message, tag="watch_session", frozen=True):
    """Events after `after`, at once if there are any, else as soon as there is one or `wait_s` is over.

    Body: WatchInfo.
    """

    request_id: str
    session: str
    after: int
    wait_s: float
    limit: int = 500


class WatchInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A session now and its events after the one asked for."""

    session: SessionInfo
    events: list[SessionEvent]
    term: int = 0  # of the orchestrator that counted these events; one of another term may count differently


class AskDeployment(Message, tag="ask_deployment", frozen=True):
    """Body: DeploymentInfo; of the session, or of a network's newest deployed session."""

    request_id: str
    name: str


class InspectSession(Message, tag="inspect_session", frozen=True):
    """Body: list[VNodeReport], in topological order; the orchestrator asks the PNodes."""

    request_id: str
    session: str


class RemoveNetwork(Message, tag="remove_network", frozen=True):
    """Delete a network, its sessions and what they stored; refused while one is deployed unless `force`."""

    request_id: str
    network: str
    force: bool = False


class CollectGarbage(Message, tag="collect_garbage", frozen=True):
    """Delete what no head's ancestry names. Body: GarbageInfo."""

    request_id: str
    network: str = ""
    dry_run: bool = True


class GarbageInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What garbage collection deleted, or with `dry_run` would delete."""

    objects: int
    size_bytes: int
    keys: list[str]
    dry_run: bool


# ---------------------------------------------------------------- anybody -> storage service
# Objects by key, as storage/store.py has them. What the service has no right answer for is Refused; docs/protocol.md
# lists the codes. Bulk travels on the forward lane, so that a question about a key never waits behind it.


class OpenStore(Message, tag="open_store", frozen=True):
    """Asked first, and again after the service was lost. Body: StoreInfo."""

    request_id: str


class StoreInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The service about itself."""

    boot: int  # of its process: later questions are for this one
    chunk_bytes: int  # the most that one message may bring or ask for
    version: str


class ProbeStore(Message, tag="probe_store", frozen=True):
    """Try out the store behind the service."""

    request_id: str


class StoreRead(Message, tag="store_read", frozen=True):
    """A piece of an object. Answer: StoreChunk. `etag`: of the object that is meant; "": whichever is there."""

    request_id: str
    key: str
    offset: int
    size_bytes: int
    etag: str = ""


class StoreChunk(Message, tag="store_chunk", frozen=True):
    """Bytes of an object from `offset` on (frame 0), fewer than asked for only at its end."""

    request_id: str
    offset: int
    size_bytes: int  # of the whole object
    etag: str
    sha256: str  # of the whole object as its writer gave it, "" if the store does not know


class StoreHead(Message, tag="store_head", frozen=True):
    """Body: StoreEntry."""

    request_id: str
    key: str


class StoreEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An object as listed. `modified_s`: by the store's clock, seconds since 1970."""

    key: str
    size_bytes: int
    etag: str
    modified_s: float


class StoreList(Message, tag="store_list", frozen=True):
    """The first `limit` objects below `prefix` whose key comes after `after`. Body: list[StoreEntry]."""

    request_id: str
    prefix: str
    after: str
    limit: int


class StoreDelete(Message, tag="store_delete", frozen=True):
    """Remove an object if it's there."""

    request_id: str
    key: str


class StorePut(Message, tag="store_put", frozen=True):
    """Write a small object: frame 0. Body: StoreWritten. `how`: "put", "absent" or, with an etag, "match"."""

    request_id: str
    key: str
    how: str
    etag: str
    sha256: str


class StoreWritten(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object was written; its etag."""

    etag: str


class StoreBegin(Message, tag="store_begin", frozen=True):
    """A large object is going to come in pieces. Body: StoreStaged, what an earlier try of the same sender brought.

    `transfer`: 32 hex digits that the sender makes of what it writes, so that it finds its own bytes again.
    """

    request_id: str
    transfer: str
    key: str
    size_bytes: int


class StoreStaged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """So many bytes of a transfer are there, without a gap."""

    size_bytes: int


class StoreAppend(Message, tag="store_append", frozen=True):
    """The next piece of a transfer: frame 0. Body: StoreStaged."""

    request_id: str
    transfer: str
    offset: int


class StoreFinish(Message, tag="store_finish", frozen=True):
    """All pieces have come: check size and digest, and write the object. Body: StoreWritten. `how`: see StorePut."""

    request_id: str
    transfer: str
    key: str
    how: str
    etag: str
    size_bytes: int
    sha256: str


# ---------------------------------------------------------------- who is let in


class Join(Message, tag="join", frozen=True):
    """Whoever has a token asks to be admitted under a name, with a key of its own."""

    request_id: str
    name: str
    key: str


class Joined(Message, tag="joined", frozen=True):
    """Admitted. Frame 0: msgpack of list[Admitted], the allow-list of this version."""

    request_id: str
    id: str
    role: str
    version: int


class Members(Message, tag="members", frozen=True):
    """Orchestrator -> PNodes, at registration and at each change. Frame 0: list[Admitted]; only a newer one counts."""

    version: int


class MemberInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is admitted, for people."""

    id: str
    role: str
    fingerprint: str
    until: float  # wall clock; 0: for good
    uses: int  # of an invitation: how often it may still be used; -1: any number
    grants: str  # of an invitation: what the joiner becomes


class RelayOpen(Message, tag="relay_open", frozen=True):
    """Asks a PNode that can be dialled to join two that can't: one stream from the sender to `to`."""

    request_id: str
    to: str


class RelayTicket(Message, tag="relay_ticket", frozen=True):
    """Answer to RelayOpen; with an empty request id, what the other end gets: where to dial, and what to say there.

    `peer`: who is at the other end. The ticket is good for one connection, within 30 s.
    """

    request_id: str
    peer: str
    address: str
    ticket: str


class ListMembers(Message, tag="list_members", frozen=True):
    """Body: list[MemberInfo]."""

    request_id: str


class Invite(Message, tag="invite", frozen=True):
    """Make a token. Body: InviteInfo."""

    request_id: str
    grants: str  # "pnode" or "client"
    uses: int  # -1: any number
    lifetime_s: float  # 0: for good


class InviteInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token: a secret, shown once and not stored."""

    token: str
    member: MemberInfo


class Revoke(Message, tag="revoke", frozen=True):
    """Take an id or a fingerprint off the allow-list, at once. Body: MemberInfo."""

    request_id: str
    member: str


class ShutDown(Message, tag="shut_down", frozen=True):
    """End this process in good order (only from loopback)."""

    request_id: str


def all_messages() -> dict[str, type[Message]]:
    """Tag -> message type, of all message types."""
    found: dict[str, type[Message]] = {}
    pending = list(Message.__subclasses__())
    while pending:
        kind = pending.pop()
        pending.extend(kind.__subclasses__())
        tag = kind.__struct_config__.tag
        if isinstance(tag, str):
            found[tag] = kind
    return dict(sorted(found.items()))

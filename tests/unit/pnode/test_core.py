from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from networks.graph import Graph
from pnode.core import Core, CoreError, State
from pnode.events import (
    Broke,
    Cause,
    Compute,
    CutCommitted,
    Done,
    Event,
    Fail,
    HoldAsked,
    HopArrived,
    Job,
    JobDone,
    JobFailed,
    JobKind,
    PeerLost,
    Refuse,
    ReportArrived,
    SaveCut,
    Saved,
    SendVerdict,
    Started,
    TellHeld,
    TellProgress,
    TieGradientArrived,
    WaitedTooLong,
)
from pnode.schedule import format_schedule, in_flight
from tests.unit.pnode.cluster import Cluster, graph_of, shares_of


def chain(**options: object) -> Cluster:
    graph = graph_of([("a", "b"), ("b", "c")], loss="c", trainable={"a", "b"})
    return Cluster(shares_of(graph, {"a": "p1", "b": "p2", "c": "p3"}, **options), random.Random(0))


def check_order(cluster: Cluster, steps: int) -> None:
    """Every stage ran exactly its schedule, step after step, and every PNode updated once a step."""
    for pnode, share in cluster.shares.items():
        for stage in share.stages:
            mine = [job for job in cluster.ran[pnode] if job.stage == stage]
            expected = [
                f"{action.kind.value}{action.microbatch} {step}"
                for step in range(share.start_step, steps)
                for action in share.schedules[stage][:-1]
            ]
            assert [f"{job.kind.value}{job.microbatch} {job.step}" for job in mine] == expected
            if stage in share.flow.stages:
                assert in_flight(share.schedules[stage]) <= share.windows[stage]
        updates = [job.step for job in cluster.ran[pnode] if job.kind is JobKind.UPDATE]
        assert updates == list(range(share.start_step, steps))


def test_a_chain_runs_to_the_end_and_holds_everywhere() -> None:
    cluster = chain()
    cluster.start(4)
    cluster.run()
    check_order(cluster, 4)
    assert not cluster.of(Refuse)
    assert sorted(pnode for pnode, _ in cluster.of(TellHeld)) == ["p1", "p2", "p3"]
    steps = [command for _, command in cluster.of(TellProgress)]
    assert [step.applied for step in steps] == [1, 2, 3, 4]  # type: ignore[union-attr]
    assert {step.loss for step in steps} == {0.5}  # type: ignore[union-attr]
    assert [command.applied for pnode, command in cluster.of(SaveCut) if pnode == "p2"] == [4]  # type: ignore[union-attr]


def random_graph(pick: random.Random) -> tuple[Graph, dict[str, str]]:
    count, pnodes = pick.randint(2, 10), pick.randint(1, 4)
    names = [f"n{i}" for i in range(count)]
    edges = [(names[pick.randrange(i)], names[i]) for i in range(1, count) for _ in range(pick.randint(1, 2))]
    trainable = {name for name in names if pick.random() < 0.6}
    ties = {}
    if trainable and count > 3:
        owner = sorted(trainable)[0]
        ties = {name: owner for name in names[names.index(owner) + 1 :] if pick.random() < 0.3}
    graph = graph_of(edges, loss=names[-1], trainable=trainable - ties.keys(), ties=ties, order=names)
    return graph, {name: f"p{pick.randrange(pnodes)}" for name in names}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1_000_000))
def test_any_graph_placement_and_order_of_arrival_does_every_action_once(seed: int) -> None:
    pick = random.Random(seed)
    graph, placement = random_graph(pick)
    steps = pick.randint(1, 4)
    shares = shares_of(
        graph, placement, microbatches=pick.randint(1, 4), steps=steps, checkpoint_every=pick.randint(0, 2)
    )
    cluster = Cluster(shares, pick)
    cluster.start(pick.randint(0, steps))
    cluster.run()
    cluster.start(steps)
    cluster.run()
    assert all(core.state is State.HELD and core.step == steps for core in cluster.cores.values()), cluster.stuck()
    check_order(cluster, steps)
    assert not cluster.of(Refuse)
    for core in cluster.cores.values():
        assert len(core._inbox) == 0


def test_duplicates_are_refused_and_change_nothing() -> None:
    cluster = chain()
    cluster.start(2)
    pick = random.Random(3)
    while cluster.wire or any(cluster.jobs.values()):
        if cluster.wire and pick.random() < 0.3:
            to, event = pick.choice(cluster.wire)
            if not isinstance(event, Started | Saved):
                cluster.wire.append((to, event))
        cluster.tick()
        if len(cluster.wire) > 200:
            pick.seed(0)
    check_order(cluster, 2)
    assert cluster.of(Refuse)


def test_early_hops_wait_in_slots_and_the_window_bounds_them() -> None:
    shares = shares_of(
        graph_of([("a", "b")], loss="b", trainable={"a"}), {"a": "p1", "b": "p2"}, microbatches=8, steps=2
    )
    core = Core(shares["p2"])
    size = shares["p2"].windows[0]

    def hop(m: int, step: int = 0, sender: str = "p1") -> list[object]:
        number = core._inbox.request_id(0, step, m)
        return list(core.handle(HopArrived(sender, step, m, 0, False, number, 0, f"x{m}"), 0.0))

    assert size == 3
    assert [hop(m) for m in range(size)] == [[]] * size
    for refused, code in [
        (hop(size), "beyond-window"),
        (hop(0), "duplicate-hop"),
        (hop(1, sender="p9"), "stray-hop"),
        (hop(9), "bad-hop"),
        (hop(0, step=7), "bad-hop"),
    ]:
        assert [type(command) for command in refused] == [Refuse]
        assert refused[0].code == code  # type: ignore[attr-defined]
    jobs = [command.job for command in core.handle(Started(2), 0.0) if isinstance(command, Compute)]
    assert [str(job) for job in jobs[:4]] == [
        "F0 of step 1 in stage 1", "B0 of step 1 in stage 1", "F1 of step 1 in stage 1", "B1 of step 1 in stage 1",
    ]  # fmt: skip
    assert core.refused == {"beyond-window": 1, "duplicate-hop": 1, "stray-hop": 1, "bad-hop": 2}


def test_everything_that_can_be_queued_is_queued_ahead() -> None:
    cluster = chain(microbatches=8, steps=3)
    for command in cluster.cores["p1"].handle(Started(3), 0.0):
        cluster.do("p1", command)
    assert [job.job.microbatch for job in cluster.jobs["p1"]] == [0, 1, 2, 3]


def test_one_value_that_is_not_finite_and_nobody_applies() -> None:
    cluster = chain()
    cluster.finite = False
    cluster.start(4)
    cluster.run()
    assert all(core.state is State.FAILED and core.applied == 0 for core in cluster.cores.values())
    told = [(pnode, command) for pnode, command in cluster.of(Fail) if command.told]  # type: ignore[union-attr]
    assert [pnode for pnode, _ in told] == ["p3"]
    assert told[0][1].vnode == "bad"  # type: ignore[union-attr]
    assert "step 1 was not applied" in told[0][1].text  # type: ignore[union-attr]
    assert {command.cause for _, command in cluster.of(Fail)} == {Cause.NUMBERS}  # type: ignore[union-attr]
    assert all(job.kind is not JobKind.UPDATE for jobs in cluster.ran.values() for job in jobs)


def test_hold_stops_all_after_the_same_step_and_saves_when_asked() -> None:
    cluster = chain(steps=40)
    cluster.start(40)
    for _ in range(200):
        cluster.tick()
    cluster.post("p3", HoldAsked(True))
    cluster.run()
    (held,) = {command.applied for _, command in cluster.of(TellHeld)}  # type: ignore[union-attr]
    assert 0 < held < 40
    assert len(cluster.of(SaveCut)) == 3
    cluster.start(40)
    cluster.run()
    check_order(cluster, 40)


def test_hold_is_decided_by_the_loss_alone() -> None:
    cluster = chain()
    commands = cluster.cores["p1"].handle(HoldAsked(False), 0.0)
    assert [type(command) for command in commands] == [Refuse]


def alone(**limits: int) -> Cluster:
    graph = graph_of([("a", "c")], loss="c", trainable={"a"})
    shares = shares_of(graph, {"a": "p1", "c": "p1"}, checkpoint_every=1, steps=30)
    return Cluster(shares, random.Random(0), commits=False, limits=limits)


def run_without(cluster: Cluster, *kinds: type) -> None:
    """Go on for as long as anything can happen, while events of these kinds are lost."""
    while cluster.tick():
        cluster.wire = [(to, event) for to, event in cluster.wire if not isinstance(event, kinds)]


def test_a_slow_store_lets_two_cuts_wait_and_then_training() -> None:
    cluster = alone()
    cluster.start(9)
    run_without(cluster, Saved)
    core = cluster.cores["p1"]
    assert core.applied == 3
    assert core.waiting() == ["store: cut of step 1"]
    cluster.post("p1", Saved(1))
    run_without(cluster, Saved)
    assert core.applied == 4
    assert core.waiting() == ["store: cut of step 2"]
    assert core.uncommitted.saved == [1]
    with pytest.raises(CoreError, match="was not being saved"):
        core.handle(Saved(77), 0.0)


def test_memory_for_more_cuts_lets_more_of_them_wait() -> None:
    cluster = alone(max_in_memory=5)
    cluster.start(30)
    run_without(cluster, Saved)
    assert cluster.cores["p1"].applied == 6


def test_training_goes_on_without_commits_for_max_uncommitted_cuts() -> None:
    cluster = alone(max_uncommitted=4)
    cluster.start(30)
    cluster.run()
    core = cluster.cores["p1"]
    assert core.applied == 5
    assert core.uncommitted.saved == [1, 2, 3, 4]
    assert core.waiting() == ["orchestrator: commit of step 1"]
    cluster.post("p1", CutCommitted(2))
    cluster.run()
    assert core.applied == 7
    assert core.uncommitted.saved == [3, 4, 5, 6]
    cluster.post("p1", CutCommitted(2))
    cluster.run()
    assert core.applied == 7


def test_a_cut_that_is_committed_before_the_store_has_answered_is_not_awaited() -> None:
    """The orchestrator may hear of a later cut's parts and answer before this side has looked at its own."""
    cluster = alone(max_uncommitted=1)
    cluster.start(30)
    run_without(cluster, Saved)
    core = cluster.cores["p1"]
    assert core.waiting() == ["store: cut of step 1"]
    cluster.post("p1", CutCommitted(1))
    cluster.post("p1", Saved(1))
    cluster.run()
    assert core.uncommitted.saved == [2]


def test_the_last_cut_holds_only_when_it_is_made() -> None:
    cluster = alone(max_uncommitted=2)
    cluster.start(3)
    cluster.run()
    core = cluster.cores["p1"]
    assert core.state is State.HELD
    assert not core.holds
    assert core.waiting() == ["orchestrator: commit of step 1"]
    cluster.post("p1", CutCommitted(1))
    cluster.run()
    assert core.holds
    assert core.waiting() == []


def test_waiting_names_who_and_what() -> None:
    cluster = chain()
    cluster.post("p2", Started(4))
    cluster.post("p3", Started(4))
    assert cluster.cores["p2"].waiting() == ["p1: activation of 'a.y' for step 1, microbatch 0"]
    assert cluster.cores["p1"].waiting() == []
    cluster.post("p1", Started(4))
    cluster.tick()
    assert cluster.cores["p1"].waiting() == []


class Timed(Cluster):
    """Looks at each core before and after each event: a wait's time begins with the wait."""

    begun = 0

    def post(self, pnode: str, event: Event) -> None:
        core = self.cores[pnode]
        waited, since = bool(core.waiting()), core.moved_at
        super().post(pnode, event)
        if core.waiting() and not waited:
            assert core.moved_at == self.clock, f"{pnode} waits for {core.waiting()}, but since {core.moved_at}"
            self.begun += 1
        elif waited and isinstance(event, HopArrived) and core.waiting():
            assert core.moved_at == since, "what does not help is no progress"


@pytest.mark.parametrize("seed", range(40))
def test_a_wait_counts_from_its_own_beginning(seed: int) -> None:
    pick = random.Random(seed)
    names = "abcde"
    edges = [(names[pick.randrange(n)], names[n]) for n in range(1, 5)]
    graph = graph_of(edges, loss="e", trainable={"a", "b"}, order=list(names))
    placement = {name: pick.choice(("p1", "p2", "p3")) for name in names}
    shares = shares_of(graph, placement, checkpoint_every=1)
    cluster = Timed(shares, pick, limits={"max_uncommitted": 2})
    cluster.start(4)
    cluster.run()
    assert cluster.begun > 0 or len(shares) == 1


def test_a_commit_lets_those_behind_it_wait_anew() -> None:
    """p1 waits for p2, which waits for a commit, as long as that may take. From the commit on the limit is a shorter
    one, so it must not count what is over."""
    graph = graph_of([("a", "b"), ("b", "c")], loss="c", trainable={"a", "b"})
    shares = shares_of(graph, {"a": "p1", "b": "p2", "c": "p3"}, checkpoint_every=1)
    cluster = Cluster(shares, random.Random(0), commits=False, limits={"max_uncommitted": 1})
    cluster.start(4)
    cluster.run()
    core = cluster.cores["p1"]
    assert core.waiting() == ["orchestrator: commit of step 1"]
    cluster.clock = 5000.0
    cluster.post("p1", CutCommitted(1))
    cluster.run(20)
    assert any(text.startswith("p2: ") for text in core.waiting())
    assert core.moved_at > 5000.0
    assert len(core.uncommitted) == 1, "the next cut"
    cluster.clock = 9000.0
    cluster.post("p1", CutCommitted(2))
    assert (core.moved_at, len(core.uncommitted)) == (9001.0, 0)
    cluster.clock = 9500.0
    cluster.post("p1", CutCommitted(2))
    assert core.moved_at == 9001.0, "told again, it is no news"


def test_the_last_wait_is_for_reports_and_verdict() -> None:
    cluster = chain()
    cluster.start(4)
    held_back = []
    while cluster.tick():
        held_back += [item for item in cluster.wire if isinstance(item[1], ReportArrived) and item[1].sender == "p1"]
        cluster.wire = [item for item in cluster.wire if item not in held_back]
    assert cluster.cores["p3"].waiting() == ["p1: report of step 1"]
    assert cluster.cores["p1"].waiting() == ["p3: verdict on step 1"]
    out = cluster.cores["p3"].handle(WaitedTooLong(600.0), 0.0)
    assert isinstance(out[0], Fail)
    assert "waited 600 s for p1: report of step 1" in out[0].text


def test_a_failed_job_names_vnode_and_job() -> None:
    cluster = chain()
    cluster.post("p1", Started(4))
    job = cluster.jobs["p1"][0].job
    out = cluster.cores["p1"].handle(JobFailed(job, "a", "boom"), 0.0)
    assert out == [Fail(0, "a", "F0 of step 1 in stage 0: boom", "", Cause.DEFECT)]
    assert cluster.cores["p1"].handle(Started(4), 0.0) == []


def test_the_loss_of_a_member_ends_the_epoch_whatever_it_does() -> None:
    """What was on its way is lost with it, so a share that goes on would wait for ever."""
    for start in ([], [Started(4)]):
        cluster = chain()
        for event in start:
            cluster.post("p1", event)
        out = cluster.cores["p1"].handle(PeerLost("p2", "gone"), 0.0)
        assert isinstance(out[0], Fail)
        assert "p2 is lost: gone" in out[0].text
        assert (out[0].cause, out[0].peer, out[0].told) == (Cause.PEER, "p2", True)
        assert cluster.cores["p1"].state is State.FAILED


def test_a_share_that_holds_takes_a_loss_silently() -> None:
    """The run has come to rest: the orchestrator finds the loss by itself, and nothing failed."""
    cluster = chain()
    cluster.start(4)
    cluster.run()
    out = cluster.cores["p1"].handle(PeerLost("p2", "gone"), 0.0)
    assert [(type(each), each.told) for each in out] == [(Fail, False)]  # type: ignore[union-attr]
    assert not cluster.cores["p1"].holds


@pytest.mark.parametrize("pnode", ["p1", "p9"])
def test_only_other_members_can_be_lost(pnode: str) -> None:
    assert chain().cores["p1"].handle(PeerLost(pnode, "gone"), 0.0) == []


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (WaitedTooLong(5.0), Cause.WAIT),
        (WaitedTooLong(5.0, Cause.STORE, "--away-limit"), Cause.STORE),
        (Broke("a", "odd", ""), Cause.DEFECT),
        (Broke("", "hangs", "", Cause.COMPUTE), Cause.COMPUTE),
        (Saved(1, "full", Cause.STORE), Cause.STORE),
    ],
)
def test_every_failure_has_a_cause(event: Event, cause: Cause) -> None:
    cluster = chain()
    cluster.post("p1", Started(4))
    (out,) = cluster.cores["p1"].handle(event, 0.0)
    assert isinstance(out, Fail)
    assert out.cause is cause


def test_a_result_that_is_not_due_tells_the_story() -> None:
    core = chain().cores["p1"]
    core.handle(Started(4), 0.0)
    with pytest.raises(CoreError, match=r"(?s)F0 of step 1.*was due.*Started\(until=4\)"):
        core.handle(JobDone(Job(JobKind.BACKWARD, 0, 0, 0), Done()), 0.0)


def test_start_again_where_it_is_answers_held() -> None:
    cluster = chain(start_step=2)
    cluster.start(2)
    cluster.run()
    assert len(cluster.of(TellHeld)) == 3
    assert not any(cluster.ran.values())
    cluster.start(4)
    cluster.run()
    check_order(cluster, 4)


def test_a_network_without_loss_can_not_start() -> None:
    cluster = chain()
    share = replace(cluster.shares["p1"], loss_pnode="")
    out = Core(share).handle(Started(1), 0.0)
    assert isinstance(out[0], Fail)
    assert out[0].cause is Cause.INPUT


def test_a_verdict_reaches_the_other_members_once() -> None:
    cluster = chain()
    sent: list[SendVerdict] = []
    plain = cluster.do

    def do(pnode: str, command: object) -> None:
        if isinstance(command, SendVerdict):
            sent.append(command)
        plain(pnode, command)  # type: ignore[arg-type]

    cluster.do = do  # type: ignore[method-assign, assignment]
    cluster.start(4)
    cluster.run()
    assert [verdict.decision.step for verdict in sent] == [0, 1, 2, 3]
    assert {verdict.to for verdict in sent} == {("p1", "p2")}
    assert all(verdict.decision.scale == pytest.approx(1 / 6) for verdict in sent)


def test_the_schedules_are_what_the_session_prints() -> None:
    share = chain(microbatches=4).shares["p1"]
    assert format_schedule(share.schedules[0]) == "F0 F1 F2 F3 B0 B1 B2 B3 U"


def test_a_tie_gradient_may_be_a_step_ahead_of_its_owner() -> None:
    """The user's branch gives nothing to the loss, so its PNode can be done with step 2 before p1 knows of step 1."""
    graph = graph_of([("a", "c"), ("r", "u")], loss="c", trainable={"a"}, ties={"u": "a"}, order=["a", "r", "u", "c"])
    cluster = Cluster(shares_of(graph, {"a": "p1", "c": "p2", "r": "p3", "u": "p3"}, steps=2), random.Random(0))
    cluster.start(2)
    late = []
    while cluster.tick():
        held = [(to, event) for to, event in cluster.wire if to == "p1" and type(event).__name__ == "VerdictArrived"]
        held += [(to, event) for to, event in cluster.wire if type(event).__name__ == "TieVersionArrived"]
        late += held
        cluster.wire = [item for item in cluster.wire if item not in held]
        if late and not cluster.wire and not any(cluster.jobs.values()):
            break
    assert cluster.cores["p1"].step == 0
    ahead = TieGradientArrived("p3", 1, "u", "early")
    assert cluster.cores["p1"].handle(ahead, 0.0) == []
    assert [type(c) for c in cluster.cores["p1"].handle(ahead, 0.0)] == [Refuse]

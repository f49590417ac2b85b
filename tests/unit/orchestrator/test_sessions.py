"""A session's life, event by event; without a clock, a bus or a store."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from orchestrator import events
from orchestrator.events import Event, Log, Record, Send, Tell
from orchestrator.lifecycle import (
    ACTIVE,
    COMMIT_S,
    PLACE_S,
    PREPARE_S,
    START_S,
    TRANSITIONS,
    ActionRefusedError,
    SessionBug,
    Stage,
    State,
)
from tests.unit.orchestrator.story import Story, report
from wire.messages import Committed, HoldRun, Release, SessionBeat, StartRun


def test_where_it_runs_is_one_short_line_and_the_reasons_follow() -> None:
    story = Story().run()
    told = [command.text for command in story.commands if isinstance(command, Log) and command.kind == "placement"]
    assert told == ["epoch 1 on p1 (2 VNodes), p2 (1 VNode), from step 0; predicted: 25 ms a step\nwhy"]


def test_deploys_in_two_phases() -> None:
    story = Story()
    placing = story.act("start", until=17)
    assert [type(command) for command in placing] == [Log, Record, events.Place]
    assert story.session.state is State.STARTING
    raising = story.feed(events.Placed({"a": "p1", "loss": "p2"}, {"p1": 1, "p2": 4}, "p2", 0))
    assert raising[-1] == Record(epoch=1)
    assert not story.sent(raising, None), "nothing is sent before the epoch is durable"
    preparing = story.feed(events.Recorded(1))
    assert [send.pnode for send in story.sent(preparing, None)] == ["p1", "p2"]
    first = story.feed(events.Answered(preparing[0].key))  # type: ignore[union-attr]
    assert first == [], "StartRun waits for every Prepare"
    starting = story.feed(events.Answered(preparing[1].key))  # type: ignore[union-attr]
    starts = story.sent(starting, StartRun)
    assert [(send.pnode, send.message.until, send.message.term) for send in starts] == [  # type: ignore[union-attr]
        ("p1", 17, 3),
        ("p2", 17, 3),
    ]
    story.answer(starting)
    assert story.session.state is State.RUNNING
    assert story.session.deployed


def test_runs_to_the_end_and_finishes_only_when_the_last_step_is_durable() -> None:
    story = Story().run()
    story.feed(events.Reported(1, (report(1), report(2))))
    assert (story.session.record.step, story.session.record.loss) == (2, 1.0)
    assert story.session.eta_s() == pytest.approx(38 * 0.5)
    assert story.session.pace.tokens_s == pytest.approx(200.0)
    story.hold(40, commit=False)
    assert story.session.state is State.RUNNING
    assert story.session.waiting(5.0) == ["PNodes and store: commit of step 40, for 5 s (at most 300 s)"]
    out = story.commit(40)
    assert story.session.state is State.FINISHED
    assert story.session.record.final_hash == "hash40"
    assert story.session.deployed, "it answers forward requests"
    assert Tell(("p1", "p2"), Committed("gpt-1", 1, 0, 40)) in out


def test_a_commit_before_the_last_hold_is_enough() -> None:
    story = Story().run()
    story.commit(40)
    assert story.session.state is State.RUNNING
    story.hold(40, commit=False)
    assert story.session.state is State.FINISHED


def test_until_pauses_with_a_checkpoint_and_resume_goes_on_without_placing_anew() -> None:
    story = Story()
    story.act("start", until=17)
    story.answer(story.answer(story.place()))
    story.hold(17)
    assert story.session.state is State.PAUSED
    assert story.session.record.committed == 17
    out = story.act("resume")
    assert not any(isinstance(command, events.Place) for command in out)
    assert Record(run=True) in out
    assert not story.sent(out, StartRun), "first it has to be durable"
    out = story.feed(events.RunRecorded())
    assert [send.message.until for send in story.sent(out, StartRun)] == [40, 40]  # type: ignore[union-attr]
    story.answer(out)
    assert story.session.record.epoch == 1
    story.hold(40)
    assert story.session.state is State.FINISHED


def paused() -> Story:
    """Deployed, at rest after step 17."""
    story = Story()
    story.act("start", until=17)
    story.answer(story.answer(story.place()))
    story.hold(17)
    assert (story.session.state, story.session.deployed) == (State.PAUSED, True)
    return story


class TestNothingStartsThatIsNotDurable:
    """An orchestrator that comes after a crash would find at rest what trains."""

    def test_the_wait_is_shown_with_what_the_store_said(self) -> None:
        story = paused()
        story.act("resume")
        story.feed(events.Troubled("run", "the disk is full"))
        assert story.session.waiting(story.now) == [
            "store: its record, before the run begins: the disk is full, for 0 s (at most 86400 s)"
        ]
        assert story.feed(events.RunRecorded())
        assert story.feed(events.RunRecorded()) == [], "told once"

    def test_a_pause_takes_it_back(self) -> None:
        story = paused()
        story.act("resume")
        story.act("pause")
        assert (story.session.state, story.session.deployed, story.session.record.hold) == (State.PAUSED, True, False)
        assert story.feed(events.RunRecorded()) == []
        assert not story.sent(story.act("resume"), StartRun), "that is another run, and another record"

    def test_a_stop_takes_it_back(self) -> None:
        story = paused()
        story.act("resume")
        story.act("stop")
        assert story.session.state is State.STOPPED
        assert story.feed(events.RunRecorded()) == []

    def test_a_record_that_is_refused_for_good_fails_it(self) -> None:
        story = paused()
        story.act("resume")
        out = story.feed(events.NotRecorded("that it is to run could not be stored: access denied", "look"))
        assert not story.sent(out, StartRun)
        assert story.session.state is State.FAILED
        assert "access denied" in story.session.record.error

    def test_a_loss_meanwhile_is_made_good(self) -> None:
        """The new epoch's record is that of the run as well."""
        story = paused()
        story.act("resume")
        story.lose("p1")
        assert story.session.state is State.RECOVERING
        out = story.answer(story.place(17, {"a": "p2", "b": "p2", "loss": "p2"}))
        assert len(story.sent(out, StartRun)) == 1

    def test_a_late_word_about_an_epoch_is_none_about_the_run(self) -> None:
        story = paused()
        story.act("resume")
        assert story.feed(events.Recorded(1)) == []


def test_pause_holds_at_the_loss_and_waits_for_all() -> None:
    story = Story().run()
    out = story.act("pause")
    (hold,) = story.sent(out, HoldRun)
    assert hold.pnode == "p2"
    assert hold.message.save  # type: ignore[union-attr]
    story.answer(out)
    assert story.session.state is State.PAUSING
    assert any("p1: end of the step under way" in line for line in story.session.waiting(1.0))
    story.feed(events.Held("p1", 1, 9))
    story.commit(9)
    assert story.session.state is State.PAUSING
    story.feed(events.Held("p2", 1, 9))
    assert story.session.state is State.PAUSED
    assert story.session.waits == {}
    assert story.act("pause") == []


def test_pause_while_starting_comes_after_the_start() -> None:
    story = Story()
    story.act("start")
    preparing = story.place()
    story.act("pause")
    out = story.answer(story.answer(preparing))
    assert story.sent(out, HoldRun)
    assert story.session.state is State.PAUSING


def test_stop_saves_and_releases() -> None:
    story = Story().run()
    story.answer(story.act("stop"))
    out = story.commit(3)
    story.hold(3, commit=False)
    assert story.session.state is State.STOPPED
    assert not story.session.deployed
    assert out
    releases = [command for command in story.commands if isinstance(command, Tell) and command.sure]
    assert [type(tell.message) for tell in releases] == [Release]
    story.act("resume")
    assert story.session.state is State.STARTING


def test_the_end_of_the_run_wins_over_a_pause() -> None:
    story = Story().run()
    story.answer(story.act("pause"))
    story.hold(40)
    assert story.session.state is State.FINISHED


def test_no_placement_fails_with_its_reason() -> None:
    story = Story()
    story.act("start")
    story.feed(events.NotPlaced("p1 lacks 3 GB", "add a PNode"))
    assert (story.session.state, story.session.record.error) == (State.FAILED, "p1 lacks 3 GB")


def test_an_epoch_that_can_not_be_stored_sends_nothing() -> None:
    story = Story()
    story.act("start")
    story.feed(events.Placed({"loss": "p2"}, {"p2": 4}, "p2", 0))
    out = story.feed(events.NotRecorded("store is full"))
    assert story.session.state is State.FAILED
    assert not story.sent(story.commands, None)
    assert not any(isinstance(command, Tell) for command in out), "nobody holds anything yet"


def test_loss_of_a_pnode_while_paused_keeps_the_state() -> None:
    story = Story().run()
    story.answer(story.act("pause"))
    story.hold(5)
    story.feed(events.MemberLost("p2", 4, "it said goodbye"))
    assert story.session.state is State.PAUSED
    assert not story.session.deployed
    out = story.act("resume")
    assert isinstance(out[-1], events.Place)


def test_what_another_epoch_says_is_ignored() -> None:
    story = Story().run()
    for event in (
        events.Reported(0, (report(30),)),
        events.Held("p1", 0, 30),
        events.RunBroke("p1", 0, "a", "boom", ""),
        events.PartsArrived(0, 30),
    ):
        assert story.feed(event) == []
    assert story.session.state is State.RUNNING
    assert story.session.record.step == 0


def test_a_broken_run_names_pnode_and_vnode_and_keeps_the_checkpoint() -> None:
    story = Story().run()
    story.commit(10)
    story.feed(events.RunBroke("p2", 1, "loss", "step 11: the loss is inf", ""))
    assert story.session.state is State.FAILED
    assert story.session.record.error == "p2, VNode loss: step 11: the loss is inf"
    assert story.session.record.committed == 10
    assert story.session.record.hint


class TestDeadlines:
    """Field case B28: nothing waits without a deadline, and who is awaited is named. What follows is recovery."""

    def test_prepare(self) -> None:
        story = Story()
        story.act("start")
        story.place()
        assert story.session.next_deadline() == PREPARE_S
        assert "p1: prepare its VNodes, for 7 s (at most 180 s)" in story.session.waiting(7.0)
        story.feed(events.Ticked(), PREPARE_S)
        assert story.session.state is State.RECOVERING
        assert "no answer from p1 within 180 s: prepare its VNodes" in story.texts("state")[-1]

    def test_a_placement_that_nobody_makes(self) -> None:
        story = Story()
        story.act("start")
        story.feed(events.Ticked(), PLACE_S)
        assert story.session.state is State.FAILED
        assert "no answer from orchestrator within 180 s: placement" in story.session.record.error

    def test_an_epoch_that_nobody_stores(self) -> None:
        story = Story()
        story.act("start")
        story.feed(events.Placed({"loss": "p2"}, {"p2": 4}, "p2", 0))
        story.feed(events.Ticked(), PLACE_S)
        assert story.session.state is State.FAILED
        assert "no answer from store within 180 s: epoch 1" in story.session.record.error

    def test_start(self) -> None:
        story = Story()
        story.act("start")
        story.answer(story.place())
        story.feed(events.Ticked(), START_S)
        assert story.session.state is State.RECOVERING
        assert "p2 within 30 s: start of the run until step 40" in story.texts("state")[-1]

    def test_hold(self) -> None:
        story = Story().run()
        story.commit(3)
        story.answer(story.act("pause"))
        story.feed(events.Held("p2", 1, 4))
        story.feed(events.Ticked(), 60.0)
        assert story.session.state is State.PAUSED
        assert not story.session.deployed
        assert "step 3 is stored; no answer from p1" in story.texts("state")[-1]

    def test_hold_of_slow_steps_waits_longer(self) -> None:
        story = Story().run()
        story.feed(events.Reported(1, (report(1, 100.0),)))
        story.answer(story.act("pause"))
        story.feed(events.Ticked(), 400.0)
        assert story.session.state is State.PAUSING

    def test_parts_of_a_cut(self) -> None:
        story = Story().run()
        story.hold(40, commit=False)
        story.feed(events.Ticked(), COMMIT_S)
        assert story.session.state is State.RECOVERING
        assert "commit of step 40" in story.texts("state")[-1]

    def test_commit(self) -> None:
        """All parts are stored: it is the store that is awaited, for as long as a store may be away."""
        story = Story().run()
        story.feed(events.PartsArrived(1, 10))
        assert story.session.waiting(5.0)[-1] == "store: commit of step 10, for 5 s (at most 86400 s)"

    def test_steps(self) -> None:
        story = Story().run()
        story.feed(events.Reported(1, (report(1),)))
        story.feed(events.Ticked(), 899.0)
        assert story.session.state is State.RUNNING
        story.feed(events.Ticked(), 1.0)
        assert story.session.state is State.RECOVERING
        assert "step 2" in story.texts("state")[-1]

    def test_every_wait_of_a_running_session_has_one(self) -> None:
        story = Story().run()
        assert story.session.next_deadline() < float("inf")


def test_a_late_answer_to_an_earlier_request_means_nothing() -> None:
    story = Story()
    story.act("start")
    old = story.place()
    story.act("stop")
    story.act("resume")
    new = story.place()
    assert {command.key for command in old if isinstance(command, Send)}.isdisjoint(
        command.key for command in new if isinstance(command, Send)
    )
    for command in old:
        if isinstance(command, Send):
            assert story.feed(events.Denied(command.key, "p1", "superseded")) == []
    assert story.session.stage is Stage.PREPARING


def test_deploy_for_inference_keeps_the_state_and_needs_no_data() -> None:
    story = Story(data_digest="", steps=0, until=0)
    story.act("deploy")
    out = story.answer(story.place())
    assert story.session.state is State.CREATED
    assert story.session.deployed
    assert not story.sent(out, StartRun)
    with pytest.raises(ActionRefusedError, match="no data"):
        story.act("start")
    story.act("undeploy")
    assert not story.session.deployed


def test_a_deployment_that_fails_keeps_the_state_too() -> None:
    story = Story()
    story.act("deploy")
    story.feed(events.NotPlaced("there is no living PNode", "dcnr up"))
    assert story.session.state is State.CREATED
    assert story.session.record.error == "there is no living PNode"
    assert story.session.stage is Stage.DOWN


def test_start_after_deploy_uses_the_deployment() -> None:
    story = Story()
    story.act("deploy")
    story.answer(story.place())
    out = story.act("start") + story.feed(events.RunRecorded())
    assert story.sent(out, StartRun)
    story.answer(out)
    assert (story.session.state, story.session.record.epoch) == (State.RUNNING, 1)


def test_resume_on_other_pnodes_releases_first() -> None:
    story = Story().run()
    story.answer(story.act("pause"))
    story.hold(5)
    out = story.act("resume", pnodes=1)
    kinds = [type(command) for command in out]
    assert kinds.index(Tell) < kinds.index(events.Place)
    assert out[-1] == events.Place(1, {})


@pytest.mark.parametrize("action", ["resume", "deploy"])
def test_what_was_asked_for_earlier_gives_way_and_what_is_asked_for_now_does_not(action: str) -> None:
    """Field case B30: a session at rest whose PNode is gone goes on with fewer, though three were asked for once."""
    story = Story(pnodes=3)
    assert story.act("start")[-1] == events.Place(3, {}), "three or nothing, the first time"
    story.answer(story.answer(story.place()))
    story.act("stop")
    story.hold(5)
    assert story.session.stage is Stage.DOWN
    assert story.act(action)[-1] == events.Place(3, {}, yielding=True)
    story.feed(events.NotPlaced("no living PNode"))
    assert story.act(action, pnodes=3)[-1] == events.Place(3, {})


@pytest.mark.parametrize(
    ("prepare", "action", "text"),
    [
        (lambda story: story.run(), "remove", "can't be removed: it is running"),
        (lambda story: story.run(), "undeploy", "can't be undeployed: it is running"),
        (lambda story: story, "pause", "can't be paused: it is created"),
        (lambda story: story, "dance", "no action 'dance'"),
        (lambda story: story.run().hold(40), "start", "has made all 40 steps"),
        (lambda story: story.run().hold(40), "stop", "can't be stopped: it is finished"),
    ],
)
def test_actions_that_the_state_does_not_allow(prepare: Callable[[Story], Any], action: str, text: str) -> None:
    story = Story()
    prepare(story)
    before = (story.session.state, story.session.stage)
    with pytest.raises(ActionRefusedError, match=text):
        story.act(action)
    assert (story.session.state, story.session.stage) == before


@pytest.mark.parametrize(("until", "text"), [(41, "has 40 steps"), (-1, "until is -1"), (10, "has made 10 steps")])
def test_until_has_to_lie_ahead(until: int, text: str) -> None:
    story = Story(committed=10)
    with pytest.raises(ActionRefusedError, match=text):
        story.act("start", until=until)
    assert story.session.state is State.CREATED


def test_remove_releases_then_deletes() -> None:
    story = Story().run()
    story.hold(40)
    out = story.act("remove")
    assert [type(command) for command in out] == [Tell, events.Delete]
    forced = Story().run()
    out = forced.act("remove", force=True)
    assert [type(command) for command in out] == [Tell, events.Delete]


def test_while_it_is_being_removed_it_takes_no_action_and_hears_nothing() -> None:
    """Or its record would be written again after it was deleted, and come back at the next start."""
    story = Story().run()
    story.act("remove", force=True)
    assert story.act("remove", force=True) == []
    for action in ("resume", "pause", "stop", "deploy", "undeploy"):
        with pytest.raises(ActionRefusedError, match="is being removed"):
            story.act(action)
    assert story.commit(9) == []
    assert story.feed(events.RunBroke("p1", 1, "a", "boom", "")) == []
    assert story.feed(events.Ticked(), after=1e6) == []
    out = story.feed(events.NotDeleted("the disk is full", "make room"))
    assert Record() in out
    assert (story.session.state, story.session.record.error) == (State.FAILED, "the disk is full")
    story.act("resume")
    assert story.session.state is State.STARTING


def test_resume_takes_back_a_pause_that_waits_for_the_start() -> None:
    story = Story()
    story.act("start")
    story.act("pause")
    story.act("resume")
    story.answer(story.answer(story.place()))
    assert story.session.state is State.RUNNING


def test_a_step_that_was_lost_is_not_called_saved() -> None:
    """The store lost the newest checkpoints: what is made again is not durable before it is committed again."""
    story = Story(committed=30, final_hash="f" * 64, state="stopped")
    story.act("resume", until=35)
    preparing = story.place(20)
    assert (story.session.record.committed, story.session.record.final_hash) == (20, "hash20")
    story.answer(story.answer(preparing))
    story.act("pause")
    story.hold(25, commit=False)
    assert story.session.state is State.PAUSING
    story.commit(25)
    assert story.session.state is State.PAUSED
    assert story.session.record.committed == 25


def test_a_commit_ends_the_wait_for_all_older_cuts() -> None:
    """Its parts may have come first; what is older can't be the head any more."""
    story = Story().run()
    for step in (6, 8):
        story.feed(events.PartsArrived(1, step))
    story.feed(events.Committed(1, 8, "hash8"))
    assert story.session.waits.of("commit") == []
    assert story.session.record.committed == 8
    story.feed(events.Committed(1, 8, "hash8"))  # what the older one's commit found
    assert (story.session.record.committed, story.session.record.final_hash) == (8, "hash8")
    assert story.texts("committed") == ["step 8 is durable, hash hash8"]


def test_the_head_may_be_ahead_of_a_run_that_holds() -> None:
    """A former orchestrator committed it; what the run holds at is as durable."""
    story = Story().run()
    story.act("pause")
    story.hold(6, commit=False)
    story.feed(events.PartsArrived(1, 6))
    story.feed(events.Committed(1, 8, "hash8"))
    assert story.session.state is State.PAUSED
    assert story.session.record.committed == 8


def test_a_pause_that_waits_for_the_start_is_recorded() -> None:
    story = Story()
    story.act("start")
    assert Record() in story.act("pause")
    assert story.session.record.hold
    assert Record() in story.act("resume")
    assert not story.session.record.hold
    story.act("pause")
    story.answer(story.answer(story.place()))
    assert story.session.state is State.PAUSING
    assert not story.session.record.hold


def test_a_wait_says_what_whoever_is_awaited_said() -> None:
    story = Story().run()
    story.feed(events.PartsArrived(1, 6))
    story.feed(events.Troubled("commit 6", "s3://b: no answer"))
    assert "store: commit of step 6: s3://b: no answer, for 0 s (at most 86400 s)" in story.session.waiting(story.now)
    story.feed(events.Committed(1, 6, "hash6"))
    story.feed(events.Troubled("commit 6", "s3://b: no answer"))
    assert not any("no answer" in line for line in story.session.waiting(story.now))


def test_a_note_about_bits_is_said_once() -> None:
    story = Story().run()
    for step in (10, 20):
        story.feed(events.PartsArrived(1, step))
        story.feed(events.Committed(1, step, "h", "not bit-exact: other CPU"))
    assert story.session.record.bit_exact == "not bit-exact: other CPU"
    said = [command for command in story.commands if isinstance(command, Log) and "not bit-exact" in command.text]
    assert len(said) == 1


def test_the_table_covers_every_state_and_finished_is_final() -> None:
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.FINISHED] == frozenset()
    reachable = set().union(*TRANSITIONS.values()) | {State.CREATED}
    assert reachable == set(State)


def test_a_forbidden_transition_tells_the_story() -> None:
    story = Story().run()
    with pytest.raises(SessionBug, match="can't go from running to created"):
        story.session._go(State.CREATED, [])


@pytest.mark.parametrize("seed", range(100))
def test_no_story_breaks_the_table_or_leaves_a_wait_without_a_deadline(seed: int) -> None:
    """Random events in random order: only refusals of actions, never a bug; active sessions always have a deadline."""
    source = random.Random(seed)
    story = Story()
    if seed % 4 == 0:
        where = {"a": "p1", "loss": "p2"} if seed % 8 else {}
        incarnations = {"p1": 1, "p2": 4} if where else {}
        state = source.choice(list(State)).value
        story = Story(state=state, epoch=3, placement=where, incarnations=incarnations, loss_pnode="p2", committed=7)
        story.feed(events.TakenOver(source.choice([0, 9])))
    pending: list[str] = []
    for _ in range(400):
        epoch = source.choice([story.session.record.epoch, story.session.record.epoch, 0, 99])
        step = source.choice([1, 17, 40])
        pnode, incarnation = source.choice(["p1", "p2", "p3"]), source.choice([1, 4, 4, 9])
        action = source.choice(["start", "resume", "pause", "stop", "deploy", "undeploy"])
        cause = source.choice(["", "numbers", "peer", "compute", "wait", "store", "defect"])
        state = source.choice(["preparing", "prepared", "running", "held", "failed"])
        here = SessionBeat("gpt-1", epoch, step, state, source.choice(["", "store: x"]), 0.0, step, [step])
        event: Event = source.choice(
            [
                events.Acted(action, until=source.choice([0, 17, 40]), pnodes=source.choice([0, 0, 2])),
                events.Move({"a": "p2", "loss": "p1"}),
                events.Placed({"a": "p1", "loss": "p2"}, {"p1": 1, "p2": 4}, "p2", source.choice([0, 17])),
                events.Placed({"a": "p1", "loss": "p1"}, {"p1": 1}, "p1", source.choice([0, 17])),
                events.NotPlaced("no", who=source.choice(["PNodes", "store"]), final=source.random() < 0.2),
                events.Recorded(epoch),
                events.Recorded(epoch),
                events.RunRecorded(),
                events.NotRecorded("no", epoch=source.choice([0, 0, 50])),
                *(events.Answered(key) for key in pending[-4:]),
                events.Denied(source.choice(pending) if pending else "x", "p1", "no", "", source.choice(["", "no"])),
                events.Reported(epoch, (report(step),)),
                events.Held(pnode, epoch, step),
                events.Beat(pnode, incarnation, source.choice([here, here, None])),
                events.PartsArrived(epoch, step),
                events.Committed(epoch, step, "h"),
                events.CommitFailed(epoch, step, "no"),
                events.RunBroke("p1", epoch, "a", "boom", "", cause),
                events.MemberLost(pnode, incarnation, "gone"),
                events.MemberJoined(pnode, incarnation),
                events.Surveyed(step, "h", source.choice(["", "", "broken"])),
                events.Ticked(),
            ]
        )
        before = story.session.record.epoch
        try:
            out = story.feed(event, source.choice([0.0, 1.0, 50.0]))
        except ActionRefusedError:
            continue
        pending += [command.key for command in out if isinstance(command, Send)]
        raised = [command.epoch for command in out if isinstance(command, Record) and command.epoch]
        assert all(epoch > before for epoch in raised), "no epoch is used twice"
        if story.session.state in ACTIVE:
            assert story.session.next_deadline() < float("inf"), event
            assert story.session.waiting(story.now)
        if story.session.stage is Stage.DOWN:
            assert not story.session.record.placement

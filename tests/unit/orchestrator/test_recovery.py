"""What a session does when something is lost; event by event, without a clock, a bus or a store."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from orchestrator import events
from orchestrator.events import Log, Place, Record, Send, Tell
from orchestrator.lifecycle import AWAY_S, PREPARE_S, RECOVER_S, RETRY_S, STALL_S, Limits, Stage, State
from orchestrator.recovery import FRUITLESS
from pnode.deploy import explain
from storage import StoreUnavailableError
from tests.unit.orchestrator.story import Story, report
from wire.errors import UnreachableError
from wire.messages import Committed, HoldRun, Release, StartRun

THREE = {"a": "p1", "b": "p2", "loss": "p3"}
WITHOUT_P2 = {"a": "p1", "b": "p1", "loss": "p3"}


def running(committed: int = 0, step: int = 0, **more: Any) -> Story:
    """A run on p1, p2 and p3."""
    story = Story(**more)
    story.act("start")
    story.answer(story.answer(story.place(0, THREE)))
    if committed:
        story.commit(committed)
    if step:
        story.feed(events.Reported(1, tuple(report(one) for one in range(1, step + 1))))
    return story


class TestLoss:
    def test_the_survivors_keep_their_vnodes_and_the_run_goes_on_by_itself(self) -> None:
        story = running(committed=17, step=19)
        story.feed(events.Ticked(), after=60.0)
        out = story.lose("p2", "no sign of life for 12 s")
        assert story.session.state is State.RECOVERING
        assert story.texts("state")[-1] == "recovering: PNode p2 is lost: no sign of life for 12 s"
        (place,) = [command for command in out if isinstance(command, Place)]
        assert place == Place(0, {}, THREE, {"p1": 1, "p2": 4, "p3": 7}, yielding=True)
        assert not any(isinstance(command, Tell) for command in out), "survivors are not released"
        preparing = story.place(17, WITHOUT_P2)
        record = story.session.record
        assert (record.epoch, record.placement, record.incarnations) == (2, WITHOUT_P2, {"p1": 1, "p3": 7})
        assert (record.loss_pnode, record.start_step, record.step, record.recoveries) == ("p3", 17, 17, 1)
        assert not any(isinstance(command, Tell) for command in preparing), "p2 is dead, nobody else left"
        assert [send.pnode for send in story.sent(preparing, None)] == ["p1", "p3"]
        story.now += 3.2
        starting = story.answer(preparing)
        assert [send.message.until for send in story.sent(starting, StartRun)] == [40, 40]
        story.answer(starting)
        assert story.session.state is State.RUNNING
        told = "recovered in 3.2 s: epoch 2 on p1, p3, from step 17; 2 steps are redone"
        assert told in story.texts("note")

    def test_the_epoch_is_durable_with_its_placement_before_anybody_hears_of_it(self) -> None:
        story = running()
        story.lose("p2")
        out = story.feed(events.Placed(WITHOUT_P2, {"p1": 1, "p3": 7}, "p3", 0))
        assert Record(epoch=2) in out
        assert not story.sent(out, None)
        assert story.session.record.placement == WITHOUT_P2

    def test_whoever_lives_but_has_no_vnodes_any_more_is_released_of_the_old_epoch(self) -> None:
        story = running()
        story.lose("p2")
        out = story.place(0, {"a": "p4", "b": "p4", "loss": "p3"})
        (tell,) = [command for command in out if isinstance(command, Tell)]
        assert tell.pnodes == ("p1",)
        assert isinstance(tell.message, Release)
        assert tell.message.epoch == 1
        story.act("stop")
        assert story.asked(Tell)[-1].pnodes == ("p4", "p3")
        assert story.asked(Tell)[-1].message.epoch == 2

    @pytest.mark.parametrize("stage", [Stage.PLACING, Stage.RAISING, Stage.PREPARING, Stage.UP])
    def test_another_loss_at_any_point_of_a_recovery(self, stage: Stage) -> None:
        """Field case B31: a donor or the replacement dies while the first loss is being made good."""
        story = running(committed=10)
        story.lose("p2")
        if stage is not Stage.PLACING:
            story.feed(events.Placed({"a": "p1", "b": "p4", "loss": "p3"}, {"p1": 1, "p4": 2, "p3": 7}, "p3", 10))
        if stage in (Stage.PREPARING, Stage.UP):
            preparing = story.feed(events.Recorded(2))
        if stage is Stage.UP:
            story.answer(preparing)
        assert story.session.stage is stage
        out = story.lose("p3" if stage is Stage.PLACING else "p4")
        assert story.session.state is State.RECOVERING
        assert any(isinstance(command, Place) for command in out)
        assert story.feed(events.Recorded(2)) == [], "a late word about the epoch that was given up"
        story.answer(story.answer(story.place(10, {"a": "p1", "b": "p1", "loss": "p1"})))
        assert story.session.state is State.RUNNING
        assert story.session.record.epoch == (2 if stage is Stage.PLACING else 3)
        assert story.session.record.recoveries == (1 if stage is Stage.PLACING else 2)

    def test_losses_are_not_counted(self) -> None:
        story = running()
        for _ in range(3 * FRUITLESS):
            story.lose("p2")
            story.answer(story.answer(story.place(0, THREE)))
        assert story.session.state is State.RUNNING

    def test_while_it_starts(self) -> None:
        story = Story()
        story.act("start")
        story.place(0, THREE)
        story.lose("p2")
        assert story.session.state is State.RECOVERING
        story.answer(story.answer(story.place(0, WITHOUT_P2)))
        assert story.session.state is State.RUNNING
        assert "nothing is redone" in story.texts("note")[-1]

    @pytest.mark.parametrize(("action", "state"), [("pause", State.PAUSED), ("stop", State.STOPPED)])
    def test_while_it_pauses_or_stops_it_rests_at_the_last_committed_step(self, action: str, state: State) -> None:
        story = running(committed=10, step=12)
        story.answer(story.act(action))
        out = story.lose("p2")
        assert story.session.state is state
        assert not story.session.deployed
        assert "step 10 is stored; PNode p2 is lost" in story.texts("state")[-1]
        assert [command.pnodes for command in out if isinstance(command, Tell)] == [("p1", "p3")]

    def test_a_pause_that_waits_for_the_start_is_not_forgotten(self) -> None:
        story = Story(committed=3)
        story.act("start")
        story.place(3, THREE)
        story.act("pause")
        story.lose("p2")
        assert story.session.state is State.PAUSED

    @pytest.mark.parametrize(("action", "state"), [("pause", State.PAUSED), ("stop", State.STOPPED)])
    @pytest.mark.parametrize("prepared", [False, True])
    def test_pause_and_stop_are_taken_at_once_while_it_recovers(
        self, action: str, state: State, prepared: bool
    ) -> None:
        story = running(committed=10)
        story.lose("p2")
        if prepared:
            story.place(10, {"a": "p1", "b": "p4", "loss": "p4"})
        out = story.act(action)
        assert story.session.state is state
        assert story.session.stage is Stage.DOWN
        (tell,) = [command for command in out if isinstance(command, Tell)]
        assert set(tell.pnodes) == ({"p1", "p4"} if prepared else {"p1", "p3"})
        assert story.feed(events.Placed(WITHOUT_P2, {"p1": 1, "p3": 7}, "p3", 10)) == []
        assert story.act("resume")[-1] == Place(0, {}, yielding=True)

    def test_a_pause_before_the_epoch_is_durable_names_only_the_one_that_is(self) -> None:
        """Nobody hears of an epoch that the store may not have: another orchestrator would use it again."""
        story = running(committed=10)
        story.lose("p2")
        story.feed(events.Placed(WITHOUT_P2, {"p1": 1, "p3": 7}, "p3", 10))
        assert (story.session.stage, story.session.record.epoch) == (Stage.RAISING, 2)
        (tell,) = [command for command in story.act("pause") if isinstance(command, Tell)]
        assert isinstance(tell.message, Release)
        assert tell.message.epoch == 1

    def test_the_last_step_is_committed_already(self) -> None:
        story = running()
        story.commit(40)
        story.lose("p2")
        assert story.session.state is State.FINISHED
        assert story.session.record.final_hash == "hash40"

    def test_the_goal_of_the_run_is_committed_already(self) -> None:
        story = Story()
        story.act("start", until=17)
        story.answer(story.answer(story.place(0, THREE)))
        story.commit(17)
        story.lose("p2")
        assert story.session.state is State.PAUSED


class TestRoom:
    def test_it_waits_for_room_and_tries_again_at_once_when_somebody_joins(self) -> None:
        story = running(committed=10)
        story.lose("p2")
        story.feed(events.NotPlaced("p1 lacks 3 GB", "add a PNode"))
        assert story.session.state is State.RECOVERING
        assert story.session.waiting(story.now + 4) == [
            "PNodes: room for gpt-1: p1 lacks 3 GB, for 4 s (at most 3600 s)"
        ]
        out = story.feed(events.MemberJoined("p4", 2))
        assert [type(command) for command in out] == [Place]
        assert story.feed(events.MemberJoined("p5", 2)) == [], "a placement is under way"

    def test_it_tries_again_every_few_seconds_until_the_limit(self) -> None:
        story = running(committed=10, limits=Limits(recover_s=60.0))
        begin = story.now
        story.lose("p2")
        tries = 0
        while story.session.state is State.RECOVERING:
            story.feed(events.NotPlaced("there is no living PNode", "", who="PNodes"))
            story.now = story.session.next_deadline()
            tries += sum(isinstance(command, Place) for command in story.feed(events.Ticked()))
        assert story.session.state is State.FAILED
        assert story.now - begin == 60.0
        assert tries in (60.0 / RETRY_S, 60.0 / RETRY_S - 1)
        assert "room for gpt-1: there is no living PNode" in story.session.record.error
        assert "--recover-limit" in story.session.record.error
        said = [text for text in story.texts("warning") if "waits for PNodes" in text]
        assert len(said) == 1, "the same reason is told once"

    def test_the_limit_counts_from_the_loss_though_placements_are_tried(self) -> None:
        story = running()
        story.lose("p2")
        story.feed(events.NotPlaced("no"))
        story.feed(events.Ticked(), after=RETRY_S)
        assert story.session.stage is Stage.PLACING
        assert story.session.waits["room"].deadline == RECOVER_S

    def test_the_store_is_named_when_it_is_the_store(self) -> None:
        story = running()
        story.lose("p2")
        story.feed(events.NotPlaced("s3://x: no answer", "", who="store"))
        assert story.session.waiting(story.now)[0].startswith("store: s3://x: no answer")

    def test_what_can_not_change_is_final(self) -> None:
        story = running()
        story.lose("p2")
        story.feed(events.NotPlaced("the network's blob is corrupt", "", final=True))
        assert story.session.state is State.FAILED

    def test_a_person_may_ask_for_less_while_it_waits(self) -> None:
        story = running(pnodes=3)
        story.lose("p2")
        story.feed(events.NotPlaced("no room"))
        out = story.act("resume", pnodes=1)
        assert [(place.pnodes, place.yielding) for place in out if isinstance(place, Place)] == [(1, True)]
        assert story.session.state is State.RECOVERING

    def test_a_store_that_can_not_take_the_epoch_is_awaited(self) -> None:
        story = running()
        story.lose("p2")
        story.feed(events.Placed(WITHOUT_P2, {"p1": 1, "p3": 7}, "p3", 0))
        story.feed(events.NotRecorded("the store is full"))
        assert (story.session.state, story.session.stage) == (State.RECOVERING, Stage.PLACING)
        assert "store: the store is full" in story.session.waiting(story.now)[0]
        story.feed(events.Ticked(), after=RETRY_S)
        story.place(0, WITHOUT_P2)
        assert story.session.record.epoch == 3, "2 may have been stored"

    def test_an_epoch_that_a_former_orchestrator_used_is_passed_over(self) -> None:
        story = running()
        story.lose("p2")
        story.feed(events.Placed(WITHOUT_P2, {"p1": 1, "p3": 7}, "p3", 0))
        story.feed(events.NotRecorded("overtaken", epoch=7))
        story.feed(events.Ticked())
        story.place(0, WITHOUT_P2)
        assert story.session.record.epoch == 8


class TestBrokenRuns:
    @pytest.mark.parametrize("cause", ["peer", "compute", "wait", "store"])
    def test_what_another_placement_may_mend(self, cause: str) -> None:
        story = running(committed=10)
        out = story.feed(events.RunBroke("p3", 1, "", "PNode p2 is lost: gone", "", cause))
        assert story.session.state is State.RECOVERING
        assert any(isinstance(command, Place) for command in out)

    @pytest.mark.parametrize("cause", ["", "numbers", "input", "defect"])
    def test_what_would_come_again(self, cause: str) -> None:
        story = running(committed=10)
        story.feed(events.RunBroke("p3", 1, "loss", "step 11: the loss is inf", "", cause))
        assert story.session.state is State.FAILED
        assert story.session.record.error == "p3, VNode loss: step 11: the loss is inf"
        assert story.session.record.hint == "dcnr resume gpt-1"
        story.act("resume")
        assert story.session.state is State.STARTING

    def test_all_pnodes_tell_of_one_loss_and_it_counts_once(self) -> None:
        story = running(committed=10)
        for pnode in ("p1", "p3"):
            story.feed(events.RunBroke(pnode, 1, "", "PNode p2 is lost", "", "peer"))
        story.lose("p2")
        story.answer(story.answer(story.place(10, WITHOUT_P2)))
        for _ in range(FRUITLESS):
            assert story.session.state is State.RUNNING
            story.feed(events.RunBroke("p1", story.session.record.epoch, "", "boom", "", "wait"))
            story.answer(story.answer(story.place(10, WITHOUT_P2)))
        assert story.session.state is State.RUNNING

    def test_three_in_a_row_without_a_committed_step_and_the_fourth_is_the_end(self) -> None:
        story = running()
        for _ in range(FRUITLESS):
            story.feed(events.RunBroke("p1", story.session.record.epoch, "", "waited too long", "", "wait"))
            story.answer(story.answer(story.place(0, THREE)))
            assert story.session.state is State.RUNNING
        story.feed(events.RunBroke("p1", story.session.record.epoch, "", "waited too long", "look at p2", "wait"))
        assert story.session.state is State.FAILED
        assert "waited too long" in story.session.record.error
        assert "try 4" in story.session.record.error
        assert story.session.record.hint == "look at p2"

    def test_progress_wipes_the_slate(self) -> None:
        story = running()
        for number in range(3 * FRUITLESS):
            story.feed(events.RunBroke("p1", story.session.record.epoch, "", "slow", "", "wait"))
            story.answer(story.answer(story.place(number, THREE)))
            story.commit(number + 1)
        assert story.session.state is State.RUNNING

    def test_a_run_that_is_started_by_hand_begins_with_a_clean_slate(self) -> None:
        story = running()
        for _ in range(FRUITLESS + 1):
            story.feed(events.RunBroke("p1", story.session.record.epoch, "", "slow", "", "wait"))
            if story.session.state is State.RECOVERING:
                story.answer(story.answer(story.place(0, THREE)))
        assert story.session.state is State.FAILED
        story.act("resume")
        story.answer(story.answer(story.place(0, THREE)))
        story.feed(events.RunBroke("p1", story.session.record.epoch, "", "slow", "", "wait"))
        assert story.session.state is State.RECOVERING

    def test_a_failed_commit(self) -> None:
        story = running()
        story.feed(events.PartsArrived(1, 10))
        story.feed(events.CommitFailed(1, 10, "the part of VNode a is not in the store"))
        assert story.session.state is State.RECOVERING
        assert "step 10 could not be committed" in story.texts("state")[-1]
        assert story.feed(events.CommitFailed(1, 10, "again"))[0] == Log(
            "warning", "step 10 could not be committed: again", 0
        )

    def test_a_commit_under_way_may_end_well_while_it_recovers(self) -> None:
        story = running()
        story.feed(events.PartsArrived(1, 10))
        story.lose("p2")
        story.feed(events.Committed(1, 10, "hash10"))
        assert story.session.record.committed == 10
        assert story.session.state is State.RECOVERING


class TestRefusals:
    def refuse(self, story: Story, code: str = "cannot-prepare") -> None:
        send = next(one for one in reversed(story.commands) if isinstance(one, Send) and one.message is None)
        story.feed(events.Denied(send.key, send.pnode, "no space left", "make room", code))

    def test_the_third_in_a_row_from_one_step_is_the_end(self) -> None:
        story = Story()
        story.act("start")
        for _ in range(2):
            story.place(0, THREE)
            self.refuse(story)
            assert story.session.state is State.RECOVERING
            assert story.session.stage is Stage.PLACING
            assert not any(isinstance(command, Place) for command in story.feed(events.Ticked(), after=0.5))
            assert any(isinstance(command, Place) for command in story.feed(events.Ticked(), after=1.0))
        story.place(0, THREE)
        self.refuse(story)
        assert story.session.state is State.FAILED
        assert story.session.record.error == "p3: no space left"
        assert story.session.record.hint == "make room"
        releases = [tell for tell in story.asked(Tell) if isinstance(tell.message, Release)]
        assert releases[-1].pnodes == ("p1", "p2", "p3")

    def test_refusals_from_another_checkpoint_begin_anew(self) -> None:
        story = Story(committed=20)
        story.act("start")
        for step in (20, 20, 10, 10):
            story.place(step, THREE)
            self.refuse(story)
            assert story.session.state is State.RECOVERING
            story.feed(events.Ticked(), after=2.0)
        assert story.session.record.committed == 10

    def test_a_store_that_is_away_is_not_counted(self) -> None:
        """With the code that a PNode gives."""
        story = Story()
        story.act("start")
        for _ in range(10):
            story.place(0, THREE)
            self.refuse(story, explain(StoreUnavailableError("s3://x: no answer"))[0])
            story.feed(events.Ticked(), after=2.0)
        assert story.session.state is State.RECOVERING

    def test_a_pnode_that_can_not_compute_is_not_counted(self) -> None:
        """With the code that a PNode gives; the next placement is without it."""
        story = Story()
        story.act("start")
        for _ in range(10):
            story.place(0, THREE)
            self.refuse(story, explain(UnreachableError("its compute thread is dead"))[0])
            story.feed(events.Ticked(), after=2.0)
        assert story.session.state is State.RECOVERING

    def test_a_late_refusal_of_an_earlier_epoch_means_nothing(self) -> None:
        story = running()
        story.lose("p2")
        old = story.place(0, WITHOUT_P2)
        story.lose("p1")
        story.place(0, {"a": "p3", "b": "p3", "loss": "p3"})
        for send in story.sent(old, None):
            assert story.feed(events.Denied(send.key, send.pnode, "superseded", "", "superseded")) == []
        assert story.session.stage is Stage.PREPARING


class TestReports:
    def test_a_prepare_that_gets_on_is_not_given_up(self) -> None:
        story = Story()
        story.act("start")
        story.place(0, THREE)
        for moved in range(1, 20):
            story.now += 100.0
            for pnode in ("p1", "p2", "p3"):
                story.beat(pnode, "preparing", moved=moved)
            story.feed(events.Ticked())
        assert story.session.stage is Stage.PREPARING
        for pnode in ("p1", "p3"):
            story.beat(pnode, "preparing", moved=30)
        story.beat("p2", "preparing", moved=19)
        story.feed(events.Ticked(), after=PREPARE_S - 1)
        assert story.session.stage is Stage.PREPARING
        story.feed(events.Ticked(), after=1)
        assert story.session.state is State.RECOVERING
        assert "no answer from p2" in story.texts("state")[-1]

    def test_a_step_that_takes_long_is_none_that_stalls(self) -> None:
        story = running()
        story.feed(events.Ticked(), after=STALL_S - 1)
        story.beat("p1", moved=1)
        story.feed(events.Ticked(), after=STALL_S - 1)
        assert story.session.state is State.RUNNING
        story.beat("p1", moved=1)
        story.feed(events.Ticked(), after=1)
        assert story.session.state is State.RECOVERING

    def test_while_the_store_is_away_nothing_is_given_up(self) -> None:
        story = running()
        story.hold(40, commit=False)
        for _ in range(40):
            story.now += 200.0
            story.beat("p2", "held", waiting="store: cut of step 40, for 9 s")
            story.feed(events.Ticked())
        assert story.session.state is State.RUNNING
        story.feed(events.Ticked(), after=AWAY_S)
        assert story.session.state is State.RECOVERING

    @pytest.mark.parametrize("said", ["failed", "missing", "other epoch"])
    def test_what_contradicts_the_record_is_believed_the_third_time(self, said: str) -> None:
        story = running()

        def tell() -> None:
            if said == "missing":
                story.feed(events.Beat("p2", 4, None))
            else:
                story.beat("p2", "failed" if said == "failed" else "running", epoch=0 if said != "failed" else 1)

        tell()
        tell()
        story.beat("p2")
        tell()
        tell()
        assert story.session.state is State.RUNNING
        tell()
        assert story.session.state is State.RECOVERING
        assert story.texts("state")[-1].startswith("recovering: p2 ")

    def test_reports_of_another_incarnation_mean_nothing(self) -> None:
        story = running()
        for _ in range(5):
            assert story.beat("p2", "failed", incarnation=99) == []
        assert story.session.state is State.RUNNING

    def test_a_pnode_that_missed_a_commit_is_told_again(self) -> None:
        story = running(committed=10)
        (tell,) = story.beat("p2", uncommitted=(5, 15))
        assert tell == Tell(("p2",), Committed("gpt-1", 1, 0, 10))
        assert story.beat("p2", uncommitted=(15,)) == []

    def test_steps_told_again_count_once(self) -> None:
        story = running()
        story.feed(events.Reported(1, (report(1), report(2))))
        story.feed(events.Reported(1, (report(5),)))
        (log,) = [
            one for one in story.feed(events.Reported(1, tuple(map(report, range(1, 7))))) if isinstance(one, Log)
        ]
        assert [one.step for one in log.steps] == [3, 4, 6]
        assert story.feed(events.Reported(1, (report(4),))) == []
        assert story.session.record.step == 6

    def test_steps_made_again_in_another_epoch_are_told(self) -> None:
        story = running(committed=2, step=5)
        story.lose("p2")
        story.answer(story.answer(story.place(2, WITHOUT_P2)))
        (log,) = [one for one in story.feed(events.Reported(2, (report(3),))) if isinstance(one, Log)]
        assert [one.step for one in log.steps] == [3]
        assert story.session.record.step == 3


class TestRebalance:
    WHERE: ClassVar = {"a": "p1", "b": "p4", "loss": "p3"}

    def test_it_holds_for_a_moment_saves_and_goes_on_elsewhere(self) -> None:
        story = running(committed=10, step=12, pnodes=3)
        out = story.feed(events.Move(self.WHERE))
        assert [send.pnode for send in story.sent(out, HoldRun)] == ["p3"]
        assert story.session.state is State.RUNNING
        story.answer(out)
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 13))
        out = story.commit(13)
        assert story.session.state is State.STARTING
        assert out[-1] == Place(0, self.WHERE)
        assert not any(isinstance(command, Tell) and isinstance(command.message, Release) for command in out)
        preparing = story.place(13, self.WHERE)
        (tell,) = [command for command in preparing if isinstance(command, Tell)]
        assert tell.pnodes == ("p2",)
        story.answer(story.answer(preparing))
        assert story.session.state is State.RUNNING
        record = story.session.record
        assert (record.epoch, record.step, record.pnodes, record.recoveries) == (2, 13, 0, 0)

    def test_a_loss_while_it_holds(self) -> None:
        story = running(committed=10)
        story.answer(story.feed(events.Move(self.WHERE)))
        story.lose("p2")
        assert story.session.state is State.RECOVERING
        story.answer(story.answer(story.place(10, WITHOUT_P2)))
        assert story.session.state is State.RUNNING
        story.hold(11)
        assert story.session.state is State.RUNNING, "the move is forgotten"

    @pytest.mark.parametrize("stage", [Stage.PLACING, Stage.RAISING, Stage.PREPARING])
    def test_a_loss_while_it_moves(self, stage: Stage) -> None:
        story = running(committed=10)
        story.answer(story.feed(events.Move(self.WHERE)))
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 13))
        story.commit(13)
        if stage is not Stage.PLACING:
            story.feed(events.Placed(self.WHERE, {"p1": 1, "p4": 2, "p3": 7}, "p3", 13))
        if stage is Stage.PREPARING:
            story.feed(events.Recorded(2))
        assert story.session.stage is stage
        story.lose("p3")
        assert story.session.state is State.RECOVERING
        story.answer(story.answer(story.place(13, {"a": "p1", "b": "p1", "loss": "p1"})))
        assert story.session.state is State.RUNNING

    def test_no_room_there_any_more(self) -> None:
        story = running(committed=10)
        story.answer(story.feed(events.Move(self.WHERE)))
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 13))
        story.commit(13)
        out = story.feed(events.NotPlaced("'p4' is not alive"))
        assert story.session.state is State.RECOVERING
        assert any(isinstance(command, Place) and command.yielding for command in out)

    def test_a_pause_wins(self) -> None:
        story = running(committed=10)
        story.answer(story.feed(events.Move(self.WHERE)))
        story.answer(story.act("pause"))
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 13))
        story.commit(13)
        assert story.session.state is State.PAUSED

    def test_the_end_of_the_run_wins(self) -> None:
        story = running()
        story.answer(story.feed(events.Move(self.WHERE)))
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 40))
        story.commit(40)
        assert story.session.state is State.FINISHED

    def test_a_session_at_rest_moves_at_once_and_stays_at_rest(self) -> None:
        story = running()
        story.answer(story.act("pause"))
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 5))
        story.commit(5)
        out = story.feed(events.Move(self.WHERE))
        assert out == [Place(0, self.WHERE)]
        story.answer(story.place(5, self.WHERE))
        assert (story.session.state, story.session.stage) == (State.PAUSED, Stage.UP)
        assert not story.sent(story.commands[-5:], StartRun)

    def test_a_hold_that_nobody_asked_for_is_no_rest(self) -> None:
        """A former orchestrator asked for it, and ended."""
        story = running()
        for pnode in ("p1", "p2", "p3"):
            story.feed(events.Held(pnode, 1, 5))
        out = story.commit(5)
        assert len(story.sent(out, StartRun)) == 3
        assert story.session.state is State.RUNNING

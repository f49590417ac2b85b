"""Field case B22: an orchestrator begins anew, and finds what the former one left; no clock, bus or store."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import events
from orchestrator.adoption import Adoption
from orchestrator.events import Place, Send, Survey, Tell
from orchestrator.lifecycle import ACTIVE, Stage, State
from tests.unit.orchestrator.story import INCARNATIONS, Story, report
from wire.messages import Committed, HoldRun, Release, SessionBeat, StartRun

WHERE = {"a": "p1", "b": "p2", "loss": "p3"}
MEMBERS = ("p1", "p2", "p3")


def left(state: State = State.RUNNING, **more: Any) -> Story:
    """A session that is found deployed on p1, p2 and p3, as epoch 5."""
    found: dict[str, Any] = {
        "state": state.value,
        "epoch": 5,
        "placement": WHERE,
        "incarnations": {pnode: INCARNATIONS[pnode] for pnode in MEMBERS},
        "loss_pnode": "p3",
        "start_step": 10,
        "step": 12,
        "committed": 10,
    }
    story = Story(**{**found, **more})
    story.feed(events.TakenOver())
    return story


def back(story: Story, *pnodes: str, state: str = "running") -> None:
    for pnode in pnodes or MEMBERS:
        story.feed(events.MemberJoined(pnode, INCARNATIONS[pnode]))
        story.beat(pnode, state)


def surveyed(story: Story, step: int = 10) -> None:
    story.feed(events.Surveyed(step, f"hash{step}"))


class TestDecision:
    def test_everybody_is_awaited(self) -> None:
        adoption = Adoption(5, {"p1": 1, "p2": 4})
        adoption.surveyed = True
        assert (adoption.verdict(), adoption.missing) == (None, ["p1", "p2"])
        adoption.beat("p1", 1, SessionBeat("s", 5, 12, "running", "", 0.0))
        adoption.joined("p2", 4)
        assert (adoption.verdict(), adoption.missing) == (None, ["p2"])
        adoption.beat("p2", 4, SessionBeat("s", 5, 12, "preparing", "", 0.0))
        assert adoption.verdict() is None
        adoption.beat("p2", 4, SessionBeat("s", 5, 12, "prepared", "", 0.0))
        assert adoption.verdict() == ""

    @pytest.mark.parametrize(
        ("incarnation", "beat", "text"),
        [
            (9, SessionBeat("s", 5, 12, "running", "", 0.0), "p2 was restarted"),
            (4, None, "p2 does not have it any more"),
            (4, SessionBeat("s", 4, 12, "running", "", 0.0), "p2 has epoch 4, not 5"),
            (4, SessionBeat("s", 6, 12, "running", "", 0.0), "p2 has epoch 6, not 5"),
            (4, SessionBeat("s", 5, 12, "failed", "", 0.0), "its part on p2 is failed"),
        ],
    )
    def test_one_that_is_ill_decides_it_once_all_are_accounted_for(
        self, incarnation: int, beat: SessionBeat | None, text: str
    ) -> None:
        adoption = Adoption(5, {"p1": 1, "p2": 4})
        adoption.surveyed = True
        adoption.beat("p2", incarnation, beat)
        assert adoption.verdict() is None, "p1 will be needed"
        adoption.beat("p1", 1, SessionBeat("s", 5, 12, "held", "", 0.0))
        assert adoption.verdict() == text

    def test_time_is_up(self) -> None:
        adoption = Adoption(5, {"p1": 1, "p2": 4})
        adoption.late = True
        assert adoption.verdict() is None, "what is committed is not known"
        adoption.surveyed = True
        assert adoption.verdict() == "p1, p2 did not come back"

    def test_strangers_mean_nothing(self) -> None:
        adoption = Adoption(5, {"p1": 1})
        adoption.surveyed = True
        adoption.beat("p9", 1, SessionBeat("s", 5, 12, "running", "", 0.0))
        adoption.ill("p9", "lost")
        assert adoption.missing == ["p1"]


class TestAdopted:
    def test_a_run_goes_on_in_its_epoch(self) -> None:
        story = left()
        assert story.session.stage is Stage.ADOPTING
        assert [type(command) for command in story.commands] == [Survey]
        assert story.session.waiting(4.0) == [
            "p1, p2, p3: take-over of gpt-1, after the orchestrator began anew, for 4 s (at most 25 s)"
        ]
        surveyed(story)
        back(story, "p1", "p2")
        assert story.session.waiting(4.0)[0].startswith("p3: take-over")
        assert not story.asked(Send)
        back(story, "p3")
        assert story.session.deployed
        assert not story.asked(Place)
        starts = story.sent(story.commands, StartRun)
        assert [(one.pnode, one.message.epoch, one.message.until) for one in starts] == [
            (pnode, 5, 40) for pnode in MEMBERS
        ]
        assert Tell(MEMBERS, Committed("gpt-1", 5, 0, 10)) in story.commands
        assert story.texts("note") == ["taken over by the orchestrator of term 3: epoch 5 on p1, p2, p3"]
        story.answer(story.commands)
        assert story.session.state is State.RUNNING
        story.hold(13, commit=False)
        story.feed(events.Held("p3", 5, 13))
        assert (story.session.record.epoch, story.session.record.recoveries) == (5, 0)

    def test_what_was_committed_without_being_recorded_counts(self) -> None:
        story = left()
        back(story)
        surveyed(story, 20)
        assert (story.session.record.committed, story.session.record.final_hash) == (20, "hash20")
        assert story.session.deployed

    def test_nothing_is_decided_before_the_store_has_said_what_is_committed(self) -> None:
        story = left()
        back(story)
        assert story.session.stage is Stage.ADOPTING
        story.feed(events.Ticked(), after=30.0)
        assert story.session.stage is Stage.ADOPTING
        assert story.session.waiting(30.0)[0].startswith("store: take-over")
        surveyed(story)
        assert story.session.deployed

    def test_once_nobody_is_waited_for_any_more_it_is_the_store(self) -> None:
        story = left()
        back(story, "p1")
        assert story.session.waiting(story.now)[0].startswith("p2, p3: ")
        story.feed(events.Ticked(), after=30.0)
        back(story, "p1")
        (wait,) = story.session.waiting(story.now + 4)
        assert wait == "store: take-over of gpt-1, after the orchestrator began anew, for 4 s (at most 86400 s)"

    def test_steps_that_the_log_has_are_not_logged_again(self) -> None:
        story = Story(state="running", epoch=5, placement=WHERE, incarnations={"p1": 1, "p2": 4, "p3": 7},
                      loss_pnode="p3", start_step=10, step=10, committed=10)  # fmt: skip
        story.feed(events.TakenOver(logged=14))
        out = story.feed(events.Reported(5, tuple(map(report, range(11, 17)))))
        assert [one.step for one in out[0].steps] == [15, 16]  # type: ignore[union-attr]
        assert story.session.record.step == 16

    def test_all_hold_at_the_end_already(self) -> None:
        story = left()
        for pnode in MEMBERS:
            story.feed(events.Held(pnode, 5, 40))
        back(story, state="held")
        surveyed(story)
        story.answer(story.commands)
        assert story.session.state is State.RUNNING
        story.commit(40)
        assert story.session.state is State.FINISHED
        assert story.session.deployed

    @pytest.mark.parametrize(("state", "rest"), [(State.PAUSING, State.PAUSED), (State.STOPPING, State.STOPPED)])
    def test_the_hold_is_asked_for_again(self, state: State, rest: State) -> None:
        story = left(state)
        back(story)
        surveyed(story)
        assert [send.pnode for send in story.sent(story.commands, HoldRun)] == ["p3"]
        assert not story.sent(story.commands, StartRun)
        story.answer(story.commands)
        for pnode in MEMBERS:
            story.feed(events.Held(pnode, 5, 14))
        story.commit(14)
        assert story.session.state is rest

    @pytest.mark.parametrize("state", [State.STARTING, State.RECOVERING])
    def test_one_that_was_about_to_run_is_started(self, state: State) -> None:
        story = left(state)
        back(story, state="prepared")
        surveyed(story)
        story.answer(story.commands)
        assert story.session.state is State.RUNNING

    @pytest.mark.parametrize("state", [State.PAUSED, State.FINISHED, State.CREATED])
    def test_one_at_rest_stays_deployed(self, state: State) -> None:
        story = left(state)
        back(story, state="held")
        surveyed(story)
        assert (story.session.state, story.session.deployed) == (state, True)
        assert not story.asked(Send)
        if state is not State.FINISHED:
            story.act("resume")
            out = story.feed(events.RunRecorded())
            assert len(story.sent(out, StartRun)) == 3

    def test_what_a_person_asks_meanwhile(self) -> None:
        story = left(State.PAUSED)
        story.act("resume")
        back(story, state="held")
        surveyed(story)
        assert not story.sent(story.commands, StartRun), "it is not durable yet"
        story.feed(events.RunRecorded())
        assert len(story.sent(story.commands, StartRun)) == 3
        story = left(State.PAUSED)
        story.act("resume")
        story.feed(events.RunRecorded())
        back(story, state="held")
        surveyed(story)
        assert len(story.sent(story.commands, StartRun)) == 3
        story = left()
        story.act("pause")
        assert (story.session.state, story.session.stage) == (State.PAUSING, Stage.ADOPTING)
        back(story)
        surveyed(story)
        assert len(story.sent(story.commands, HoldRun)) == 1
        story = left()
        story.act("pause")
        story.act("stop")
        assert story.session.state is State.STOPPING
        story = left(State.RECOVERING)
        story.act("stop")
        assert (story.session.state, story.session.stage) == (State.STOPPED, Stage.DOWN)
        assert story.asked(Tell)[-1].pnodes == MEMBERS

    def test_a_pause_that_waited_for_the_start_is_not_forgotten(self) -> None:
        story = left(State.STARTING, hold=True)
        surveyed(story)
        back(story, state="prepared")
        story.answer([one for one in story.commands if isinstance(one, Send)])
        assert story.session.state is State.PAUSING


class TestNotAdopted:
    def test_somebody_does_not_come_back(self) -> None:
        story = left()
        surveyed(story)
        back(story, "p1", "p3")
        story.feed(events.Ticked(), after=24.9)
        assert story.session.stage is Stage.ADOPTING
        out = story.feed(events.Ticked(), after=0.1)
        assert story.session.state is State.RECOVERING
        assert story.texts("state")[-1] == "recovering: the orchestrator began anew, and p2 did not come back"
        (place,) = [command for command in out if isinstance(command, Place)]
        assert place == Place(0, {}, WHERE, {"p1": 1, "p2": 4, "p3": 7}, yielding=True)
        story.answer(story.answer(story.place(10, {"a": "p1", "b": "p1", "loss": "p3"})))
        assert (story.session.state, story.session.record.epoch) == (State.RUNNING, 6)
        assert story.session.record.recoveries == 1

    def test_somebody_was_restarted_and_all_are_accounted_for(self) -> None:
        story = left()
        surveyed(story)
        back(story, "p1", "p3")
        story.feed(events.MemberJoined("p2", 99))
        assert story.session.state is State.RECOVERING
        assert "p2 was restarted" in story.texts("state")[-1]

    def test_somebody_has_another_epoch_and_it_is_not_used_again(self) -> None:
        story = left()
        surveyed(story)
        back(story, "p1", "p3")
        story.beat("p2", epoch=9)
        assert story.session.state is State.RECOVERING
        story.place(10, WHERE)
        assert story.session.record.epoch == 10

    def test_a_run_that_broke_meanwhile(self) -> None:
        story = left()
        surveyed(story)
        story.feed(events.RunBroke("p1", 5, "", "PNode p2 is lost", "", "peer"))
        assert story.session.stage is Stage.ADOPTING
        back(story, "p3")
        story.feed(events.Ticked(), after=25.0)
        assert story.session.state is State.RECOVERING
        assert "p1: PNode p2 is lost; p2 did not come back" in story.texts("state")[-1]

    def test_numbers_that_are_not_finite_are_final_even_now(self) -> None:
        story = left()
        story.feed(events.RunBroke("p1", 5, "loss", "the loss is inf", "", "numbers"))
        assert story.session.state is State.FAILED

    @pytest.mark.parametrize("state", sorted(ACTIVE, key=lambda one: one.value))
    def test_nothing_was_deployed_yet(self, state: State) -> None:
        story = left(state, placement={}, incarnations={}, loss_pnode="")
        surveyed(story)
        story.feed(events.MemberJoined("p1", 1))
        assert story.session.stage is Stage.ADOPTING, "the first PNode that comes back is not all there are"
        story.feed(events.Ticked(), after=25.0)
        rests = {State.PAUSING: State.PAUSED, State.STOPPING: State.STOPPED}
        assert story.session.state is rests.get(state, State.RECOVERING)

    def test_one_that_pauses_rests_at_its_last_committed_step(self) -> None:
        story = left(State.PAUSING)
        surveyed(story)
        story.feed(events.Ticked(), after=25.0)
        assert story.session.state is State.PAUSED
        assert not story.session.deployed

    @pytest.mark.parametrize("state", [State.PAUSED, State.FINISHED, State.CREATED])
    def test_one_at_rest_is_quietly_taken_down(self, state: State) -> None:
        story = left(state)
        surveyed(story)
        back(story, "p1")
        story.feed(events.Ticked(), after=25.0)
        assert (story.session.state, story.session.stage) == (state, Stage.DOWN)
        assert story.session.record.error == ""
        (tell,) = story.asked(Tell)
        assert isinstance(tell.message, Release)
        assert story.session.record.placement == {}

    @pytest.mark.parametrize("state", [State.PAUSED, State.STOPPED, State.FAILED, State.FINISHED, State.CREATED])
    def test_one_at_rest_that_is_not_deployed_is_left_alone(self, state: State) -> None:
        story = left(state, placement={}, incarnations={}, loss_pnode="")
        assert story.commands == []
        assert story.session.stage is Stage.DOWN
        assert story.session.state is state

    def test_a_checkpoint_or_network_that_can_not_be_read(self) -> None:
        story = left()
        back(story)
        story.feed(events.Surveyed(10, "hash10", "the network's blob is corrupt"))
        assert story.session.state is State.RECOVERING
        assert "the network's blob is corrupt" in story.texts("state")[-1]

"""Histories that break one promise each, as far as one can be broken alone. `BAD`: (the promise, what makes it)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from tests.sim.handmade import PREFIX, RECORD, Story, digest, good, manifest_body, part_bytes, sealed
from tests.sim.history import Computed, History, Wrote

BAD: list[tuple[str, Callable[[], History]]] = []


def breaks(invariant: str) -> Callable[[Callable[[], History]], Callable[[], History]]:
    """Note what the history breaks."""

    def note(make: Callable[[], History]) -> Callable[[], History]:
        BAD.append((invariant, make))
        return make

    return note


def midway() -> Story:
    """A run of four steps after its second, which is committed."""
    story = Story().begin()
    for step in (1, 2):
        story.step(step)
        story.commit(step)
    return story


def ends(story: Story, first: int = 3) -> History:
    """Make the remaining steps."""
    for step in range(first, story.steps + 1):
        story.step(step)
        story.commit(step)
    return story.finish()


def part_key(vnode: str, step: int) -> str:
    """Where a part is."""
    return f"{PREFIX}parts/{digest(part_bytes(vnode, step))}.safetensors"


# ------------------------------------------------------------------------------------------------ exactly once


@breaks("exactly once")
def applied_twice() -> History:
    story = midway()
    story.apply("p1", 2)
    return ends(story)


@breaks("exactly once")
def left_out() -> History:
    story = midway()
    story.apply("p1", 4)
    return story.finish()


@breaks("exactly once")
def ahead_of_the_others() -> History:
    story = midway()
    story.apply("p1", 3)
    story.apply("p1", 4)
    story.apply("p2", 3)
    story.apply("p2", 4)
    story.commit(4)
    return story.finish()


@breaks("exactly once")
def replay_from_another_step() -> History:
    story = midway()
    story.step(3)
    story.new_epoch(2)
    story.step(4)
    story.commit(4)
    return story.finish()


@breaks("exactly once")
def never_made() -> History:
    story = midway()
    story.step(3)
    story.commit(3)
    story.steps = story.history.steps = 4
    return story.finish()


# ------------------------------------------------------------------------------------------------ the truth's numbers


@breaks("same numbers")
def other_weights() -> History:
    story = midway()
    story.apply("p1", 3, weights={"a": digest("other")})
    story.apply("p2", 3)
    story.commit(3)
    return ends(story, 4)


@breaks("same numbers")
def other_samples() -> History:
    story = midway()
    story.apply("p1", 3)
    story.apply("p2", 3, samples=story.truth.samples[2])
    story.commit(3)
    return ends(story, 4)


@breaks("same numbers")
def other_loss() -> History:
    story = midway()
    story.apply("p1", 3)
    story.apply("p2", 3, loss=0.33333)
    story.commit(3)
    return ends(story, 4)


@breaks("same numbers")
def other_loss_reported() -> History:
    story = midway()
    story.deliver("p2", "orch", "Progress", session="run-1", epoch=1, steps=[{"step": 2, "loss": 0.4}])
    return ends(story)


@breaks("same numbers")
def other_state_committed() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    story.head(3, story.manifest(3, counters={"step": 2}))
    return ends(story, 4)


# ------------------------------------------------------------------------------------------------ one owner


@breaks("one owner")
def two_processes_apply_a_vnode() -> History:
    story = midway()
    story.step(3)
    story.process("p1", "start", boot=99)
    story.grant("p1", 2)
    story.apply("p1", 4, boot=99)
    story.apply("p2", 4)
    story.commit(4)
    return story.finish()


@breaks("one owner")
def not_the_placement() -> History:
    story = midway()
    story.apply("p1", 3, weights={vnode: story.truth.weights[3][vnode] for vnode in ("a", "b")})
    return ends(story)


@breaks("one owner")
def incarnation_of_before() -> History:
    story = midway()
    story.incarnations = {"p1": 2, "p2": 1}
    story.new_epoch(2)
    return ends(story)


@breaks("fenced by epoch")
def old_epoch_after_new() -> History:
    story = midway()
    story.new_epoch(2)
    story.step(3)
    story.apply("p1", 3, epoch=1)
    story.commit(3)
    return ends(story, 4)


@breaks("fenced by epoch")
def released_goes_on() -> History:
    story = Story(6).begin()
    for step in (1, 2):
        story.step(step)
        story.commit(step)
    story.deliver("orch", "p1", "Release", session="run-1", epoch=1, term=1)
    return ends(story)


@breaks("epochs are recorded first")
def epoch_not_stored() -> History:
    story = midway()
    story.epoch += 1
    story.start = 2
    story.step(3)
    story.record()
    story.step(4)
    story.commit(4)
    return story.finish()


@breaks("the dead do nothing")
def computes_after_death() -> History:
    story = midway()
    story.process("p1", "kill")
    return ends(story)


@breaks("the dead do nothing")
def writes_long_after_death() -> History:
    story = midway()
    story.process("orch", "kill")
    story.later(300.0)
    story.record()
    story.process("orch", "start", boot=2)
    story.take_over(term=2)
    return ends(story)


# ------------------------------------------------------------------------------------------------ terms, epochs, …


@breaks("terms grow")
def term_taken_twice() -> History:
    story = midway()
    story.process("orch", "kill")
    story.process("orch", "start", boot=2)
    story.take_over(term=1)
    return ends(story)


@breaks("one orchestrator")
def writes_without_a_term() -> History:
    story = midway()
    story.process("orch", "start", boot=2)
    return ends(story)


@breaks("one orchestrator")
def old_term_writes_after_new() -> History:
    story = midway()
    old = story.boots["orch"]
    story.process("orch", "start", boot=2)
    story.take_over(term=2)
    story.step(3)
    story.commit(3)
    story.boots["orch"], story.term = old, 1
    story.step(4)
    story.commit(4)
    return story.finish()


@breaks("one orchestrator")
def head_of_another_term() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    story.head(3, story.manifest(3, term=2), term=2)
    return ends(story, 4)


@breaks("one orchestrator")
def speaks_for_another_term() -> History:
    story = midway()
    story.deliver("orch", "p1", "StartRun", session="run-1", epoch=1, term=2)
    return ends(story)


@breaks("one orchestrator")
def superseded_runs_on() -> History:
    story = midway()
    story.process("orch", "start", boot=2)
    story.take_over(term=2)
    story.later(100.0)
    return ends(story)


@breaks("epochs grow")
def epoch_falls() -> History:
    story = midway()
    story.new_epoch(2)
    story.epoch = 1
    story.record(start_step=0)
    story.epoch = 2
    return ends(story)


@breaks("epochs grow")
def epoch_changes_its_placement() -> History:
    story = midway()
    story.record(placement={"a": "p2", "b": "p1"})
    return ends(story)


@breaks("incarnations grow")
def incarnation_twice() -> History:
    story = midway()
    story.process("p1", "start", boot=99)
    story.grant("p1", 1)
    story.boots["p1"] = 11
    return ends(story)


@breaks("incarnations grow")
def incarnation_told_too_early() -> History:
    story = midway()
    story.process("p1", "start", boot=99)
    story.deliver("orch", "p1", "Registered", incarnation=2, term=1)
    story.boots["p1"] = 11
    return ends(story)


@breaks("incarnations grow")
def incarnations_forgotten() -> History:
    story = midway()
    story.write("orch", "registry/incarnations.json", sealed({"granted": {"p2": 1}}))
    return ends(story)


# ------------------------------------------------------------------------------------------------ commits


@breaks("whole commits")
def commit_before_upload() -> History:
    story = midway()
    story.step(3)
    story.parts(3, but="b")
    named = story.manifest(3)
    story.head(3, named)
    story.parts(3)
    return ends(story, 4)


@breaks("whole commits")
def part_with_other_bytes() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    story.write("p1", part_key("a", 3), part_bytes("a", 3), sha=digest("cut short"))
    story.head(3, story.manifest(3))
    story.write("p1", part_key("a", 3), part_bytes("a", 3))
    return ends(story, 4)


@breaks("whole commits")
def head_without_manifest() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    body = json.dumps(manifest_body(3, 1, 1, story.parent)).encode()
    key = f"{PREFIX}manifests/0000000003-{digest(body)}.json"
    story.head(3, (key, digest(body), story.truth.hashes[3]))
    return ends(story, 4)


@breaks("whole commits")
def manifest_of_another_digest() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    key, _, state = story.manifest(3)
    story.write("orch", key, json.dumps(manifest_body(3, 1, 1, story.parent), indent=1).encode())
    story.head(3, (key, digest(json.dumps(manifest_body(3, 1, 1, story.parent), indent=1)), state))
    return ends(story, 4)


@breaks("whole records")
def record_torn() -> History:
    story = midway()
    story.write("orch", RECORD, sealed({"session": "run-1"})[:-20])
    return ends(story)


@breaks("one line of heads")
def head_goes_back() -> History:
    story = midway()
    story.head(1, story.manifest(1))
    return ends(story)


@breaks("one line of heads")
def parent_is_not_the_head() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    story.head(3, story.manifest(3, parent=""))
    return ends(story, 4)


@breaks("one line of heads")
def cut_of_an_older_epoch() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    story.new_epoch(2)
    story.head(3, story.manifest(3, epoch=1), epoch=1)
    return ends(story)


@breaks("one line of heads")
def committed_before_all_applied() -> History:
    story = midway()
    story.apply("p1", 3)
    story.commit(3)
    story.apply("p2", 3)
    return ends(story, 4)


@breaks("one line of heads")
def epoch_starts_behind_the_head() -> History:
    story = midway()
    story.new_epoch(1)
    story.step(2)
    return ends(story)


@breaks("committed is durable")
def told_before_the_head_moved() -> History:
    story = midway()
    story.step(3)
    story.parts(3)
    story.told("committed", step=3)
    story.head(3, story.manifest(3))
    return ends(story, 4)


@breaks("committed is durable")
def pnode_told_before_the_head_moved() -> History:
    story = midway()
    story.deliver("orch", "p1", "Committed", session="run-1", epoch=1, step=3)
    return ends(story)


@breaks("committed is durable")
def recorded_committed_falls() -> History:
    story = midway()
    story.record(committed=1)
    return ends(story)


@breaks("kept is kept")
def kept_part_deleted() -> History:
    story = midway()
    story.delete("orch", part_key("a", 1))
    return ends(story)


@breaks("kept is kept")
def kept_part_overwritten() -> History:
    story = midway()
    story.write("p1", part_key("a", 2), b"other bytes")
    return ends(story)


@breaks("kept is kept")
def kept_part_gone_at_the_end() -> History:
    history = ends(midway())
    del history.store[part_key("b", 4)]
    return history


@breaks("final hash")
def last_step_not_committed() -> History:
    story = midway()
    story.step(3)
    story.commit(3)
    story.step(4)
    return story.finish()


# ------------------------------------------------------------------------------------------------ what clients see


@breaks("the client's view")
def created_again() -> History:
    story = midway()
    story.told("state", state="created")
    story.told("state", state="running")
    return ends(story)


@breaks("the client's view")
def runs_after_the_end() -> History:
    story = midway()
    ends(story)
    story.told("state", state="running")
    return story.history


@breaks("the client's view")
def committed_falls() -> History:
    story = midway()
    story.told("committed", step=1)
    return ends(story)


@breaks("the client's view")
def end_not_seen() -> History:
    history = ends(midway())
    history.events = [event for event in history.events if getattr(event, "state", "") != "finished"]
    return history


@breaks("a disturbed run goes on")
def failed() -> History:
    story = midway()
    story.told("state", state="failed", text="PNode p1 is lost")
    story.deliver("client", "orch", "ActOnSession", action="resume")
    story.told("state", state="starting")
    story.told("state", state="running")
    return ends(story)


# ------------------------------------------------------------------------------------------------ nothing waits


@breaks("the run finishes")
def stands_still() -> History:
    history = midway().finish()
    history.ended = "gave up after 3600 s"
    return history


@breaks("the run finishes")
def too_late() -> History:
    story = midway()
    story.later(3600.0)
    return ends(story)


@breaks("every wait has a deadline")
def wait_without_deadline() -> History:
    history = ends(midway())
    history.waiting = ["p2: parts of step 3"]
    return history


@breaks("every wait has a deadline")
def wait_beyond_its_deadline() -> History:
    history = ends(midway())
    history.waiting = ["p2: report of step 3, for 90 s (at most 30 s)"]
    return history


@breaks("nothing unforeseen")
def exception() -> History:
    history = ends(midway())
    history.errors = ["orch#1: KeyError: 'p1'"]
    return history


# ------------------------------------------------------------------------------------------------ worlds that can't be


@breaks("the history can be")
def time_goes_back() -> History:
    story = midway()
    story.t -= 2.0
    return ends(story)


@breaks("the history can be")
def boot_twice() -> History:
    story = midway()
    story.process("p1", "start")
    return ends(story)


@breaks("the history can be")
def message_to_the_dead() -> History:
    story = midway()
    story.process("client", "kill")
    story.deliver("orch", "client", "Ok", request_id="1")
    return ends(story)


@breaks("the history can be")
def nothing_ever_computed() -> History:
    history = Story().begin().finish()
    history.ended = "gave up"
    return history


@breaks("the history can be")
def stored_bytes_changed_by_nobody() -> History:
    history = ends(midway())
    history.store[RECORD] = (digest("other"), 5)
    return history


def without(history: History, kind: type[Computed] | type[Wrote], place: int) -> History:
    """The history less its `place`-th event of a kind."""
    events = [event for event in history.events if isinstance(event, kind)]
    return replace(history, events=[event for event in history.events if event is not events[place]])


__all__ = ["BAD", "good", "without"]

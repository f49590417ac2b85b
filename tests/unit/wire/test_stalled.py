"""Which connections libzmq reads no more, told by what was read and what waits."""

from __future__ import annotations

from wire.stalled import Suspects


def test_the_one_that_reads_nothing_though_something_waits_is_found_at_the_second_look() -> None:
    state: dict[int, tuple[int, int]] = {1: (100, 0), 2: (200, 0), 3: (300, 5)}
    suspects = Suspects()
    assert suspects.suspect([1, 2, 3, 4], state.get)
    assert len(suspects) == 3, "4 is no connection"
    assert suspects.look(state.get) == []
    state |= {1: (100, 40), 2: (240, 0), 3: (305, 0)}
    assert suspects.look(state.get) == []
    assert len(suspects) == 1
    assert suspects.look(state.get) == [1]
    assert not len(suspects)


def test_one_that_is_idle_stays_a_suspect_and_one_that_closed_is_none() -> None:
    state: dict[int, tuple[int, int]] = {1: (100, 0), 2: (200, 0), 3: (0, 0)}
    suspects = Suspects()
    suspects.suspect(state, state.get)
    suspects.drop(3)
    del state[2]
    for _ in range(5):
        assert suspects.look(state.get) == []
    assert len(suspects) == 1
    state[1] = (100, 1)
    assert suspects.look(state.get) == []
    state[1] = (101, 0)
    assert suspects.look(state.get) == []
    assert not suspects.suspect([], state.get)


def test_a_second_suspicion_does_not_forget_the_first() -> None:
    state = {1: (100, 7)}
    suspects = Suspects()
    suspects.suspect([1], state.get)
    assert suspects.look(state.get) == []
    suspects.suspect([1], state.get)
    assert suspects.look(state.get) == [1]

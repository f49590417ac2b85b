"""Fetching while the store misbehaves, in virtual time: every try has an end, and what is waited for is said."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pnode.fetch import Fetch
from storage.store import NotFoundError, StoreUnavailableError
from wire.sim import run_sim

AWAY_S = 20.0


class Scene:
    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time
        self.fetch = Fetch(None, self.now, AWAY_S)  # type: ignore[arg-type]

    def get(self, work: Callable[[], Awaitable[str]]) -> asyncio.Task[str]:
        return asyncio.ensure_future(self.fetch._patiently(work))  # type: ignore[arg-type]


def simulate(script: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        await script(Scene())

    run_sim(main())


async def away(after_s: float = 0.0, text: str = "away") -> str:
    await asyncio.sleep(after_s)
    raise StoreUnavailableError(text)


async def ended(task: asyncio.Task[str]) -> str:
    with pytest.raises(StoreUnavailableError) as error:
        await task
    return error.value.message


def test_a_store_that_is_away_is_given_up_and_shown_till_then() -> None:
    async def script(scene: Scene) -> None:
        task = scene.get(away)
        await asyncio.sleep(12.0)
        assert scene.fetch.trouble == ("away", 0.0)
        assert await ended(task) == "away"
        assert AWAY_S - 4.0 <= scene.now() <= AWAY_S
        assert scene.fetch.trouble == ("", 0.0)

    simulate(script)


def test_a_try_that_hangs_ends_with_the_limit() -> None:
    """The first one may take its time; once the store has failed, nothing outlasts the limit that is shown."""

    async def script(scene: Scene) -> None:
        tries = 0

        async def work() -> str:
            nonlocal tries
            tries += 1
            return await away(100.0 if tries == 1 else 1e6)

        task = scene.get(work)
        await asyncio.sleep(99.0)
        assert scene.fetch.trouble == ("", 0.0), "it has not failed"
        await asyncio.sleep(10.0)
        assert scene.fetch.trouble == ("away", 100.0)
        assert await ended(task) == "away"
        assert scene.now() == pytest.approx(100.0 + AWAY_S)
        assert tries == 2

    simulate(script)


def test_while_bytes_come_nothing_is_cut_short_and_nothing_is_waited_for() -> None:
    async def script(scene: Scene) -> None:
        tries = 0

        async def work() -> str:
            nonlocal tries
            tries += 1
            if tries == 1:
                return await away()
            for _ in range(50):
                await asyncio.sleep(5.0)
                scene.fetch._came(1)
                assert scene.fetch.trouble == ("", 0.0)
            return "all"

        assert await scene.get(work) == "all"
        assert scene.now() > 250.0
        assert scene.fetch.moved == 50

    simulate(script)


def test_a_body_that_breaks_off_each_time_ends_too() -> None:
    """Bytes come with each try, so it moves; yet it must not go on for ever."""

    async def script(scene: Scene) -> None:
        async def work() -> str:
            await asyncio.sleep(7.0)
            scene.fetch._came(100)
            return await away(7.0)

        assert await ended(scene.get(work)) == "away"
        assert scene.now() <= 14.0 + AWAY_S + 14.0

    simulate(script)


def test_the_one_that_waits_longest_is_shown_until_it_has_what_it_wants() -> None:
    async def script(scene: Scene) -> None:
        back: set[str] = set()

        async def work(name: str, after_s: float) -> str:
            await asyncio.sleep(after_s)
            return name if name in back else await away(text=name)

        first = scene.get(lambda: work("first", 0.0))
        second = scene.get(lambda: work("second", 1.5))
        await asyncio.sleep(4.0)
        assert scene.fetch.trouble == ("first", 0.0)
        back.add("first")
        assert await first == "first"
        assert scene.fetch.trouble == ("second", 1.5)
        back.add("second")
        assert await second == "second"
        assert scene.fetch.trouble == ("", 0.0)

    simulate(script)


def test_what_is_not_there_is_not_asked_for_again_and_a_cancelled_one_is_not_shown() -> None:
    async def script(scene: Scene) -> None:
        async def missing() -> str:
            raise NotFoundError("gone")

        with pytest.raises(NotFoundError):
            await scene.get(missing)
        assert scene.now() == 0.0
        task = scene.get(away)
        await asyncio.sleep(3.0)
        task.cancel()
        await asyncio.wait([task])
        assert scene.fetch.trouble == ("", 0.0)

    simulate(script)


def test_a_timeout_that_is_not_ours_goes_through() -> None:
    async def script(scene: Scene) -> None:
        async def work() -> str:
            raise TimeoutError("its own")

        with pytest.raises(TimeoutError, match="its own"):
            await scene.get(work)

    simulate(script)

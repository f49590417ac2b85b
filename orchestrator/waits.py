"""What a session waits for: who, what, since when, and until when at most. Pure; nothing waits without a deadline."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.events import Wait


class Waits(dict[str, Wait]):
    """The waits of one session, by a key that begins with its kind: `prepare p2 7`, `commit 17`."""

    def begin(self, key: str, who: str, what: str, limit_s: float, now: float) -> None:
        """Wait from now on, anew if it is awaited already."""
        self[key] = Wait(who, what, now, now + limit_s)

    def extend(self, key: str, limit_s: float, now: float) -> None:
        """There is progress: the limit counts from now. A wait is never cut short by it."""
        wait = self[key]
        self[key] = replace(wait, deadline=max(wait.deadline, now + limit_s))

    def trouble(self, key: str, text: str) -> None:
        """It did not work so far, if it's awaited at all."""
        if (wait := self.get(key)) is not None:
            self[key] = replace(wait, trouble=text)

    def end(self, *keys: str) -> bool:
        """Wait for these no longer; whether any of them was awaited."""
        ended = [self.pop(key, None) for key in keys]
        return any(wait is not None for wait in ended)

    def of(self, kind: str) -> list[str]:
        """Keys of that kind."""
        return [key for key in self if key.partition(" ")[0] == kind]

    def only(self, *kinds: str) -> None:
        """Forget all waits but those of these kinds."""
        for key in [key for key in self if key.partition(" ")[0] not in kinds]:
            del self[key]

    def late(self, now: float) -> dict[str, Wait]:
        """Take out the waits whose deadline has passed."""
        return {key: self.pop(key) for key in [key for key, wait in self.items() if now >= wait.deadline]}

    def sentences(self, now: float) -> list[str]:
        """Each wait as a sentence."""
        return [
            sentence(
                f"{wait.who}: {wait.what}" + (f": {wait.trouble}" if wait.trouble else ""),
                now - wait.since,
                wait.deadline - wait.since,
            )
            for wait in self.values()
        ]

    def deadline(self) -> float:
        """The soonest of all."""
        return min((wait.deadline for wait in self.values()), default=float("inf"))


def sentence(what: str, seconds: float, limit_s: float) -> str:
    """A wait as it is shown, whoever waits."""
    return f"{what}, for {seconds:.0f} s (at most {limit_s:.0f} s)"


def said_by(who: str, text: str) -> str:
    """Whoever tells of "this machine" means its own, and is read at another one."""
    return text.replace("this machine", who)

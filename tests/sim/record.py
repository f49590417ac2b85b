"""What happens is written down as it happens, as the plain records of `history`, and told to whoever waits for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from tests.sim.history import Computed, Delivered, Event, Fault, History, Process, Told, Wrote
from tests.sim.life import Life
from wire.messages import Hop, Message, TieGradient, TieVersion

LEFT_OUT = frozenset({"tensors", "profile", "environment"})
CONTROL_OBJECTS = ("registry/", "/head.json", "/manifests/")


class Recorder:
    """Takes down events while it is `open`; `watch` functions are called with each of them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.open = True
        self.events: list[Event] = []
        self.errors: list[str] = []
        self.visited: set[str] = set()
        self.trace: list[str] | None = None
        self.watch: list[Callable[[Event], None]] = []

    def add(self, event: Event) -> None:
        """One more event."""
        if self.open:
            self.events.append(event)
            for watcher in self.watch:
                watcher(event)

    def process(self, life: Life, what: str, detail: str = "") -> None:
        """A process began, ended, stands still or goes on."""
        self.add(Process(self.now(), life.name, life.boot, what, detail))

    def fault(self, kind: str, where: str, seconds: float) -> None:
        """The world did something."""
        self.add(Fault(self.now(), kind, where, seconds))

    def wrote(self, life: Life | None, how: str, key: str, sha256: str, data: bytes) -> None:
        """A write is visible."""
        name, boot = (life.name, life.boot) if life is not None else ("world", 0)
        kept = data if any(part in key for part in CONTROL_OBJECTS) else b""
        self.add(Wrote(self.now(), name, boot, how, key, sha256, len(data), kept))

    def delivered(self, src: str, src_boot: int, life: Life, message: Message) -> None:
        """A message was handed over."""
        if self.open:
            fields = plain_fields(message)
            kind = type(message).__name__
            self.add(Delivered(self.now(), src, src_boot, life.name, life.boot, kind, fields))

    def computed(self, event: Computed) -> None:
        """An update was applied."""
        self.add(event)

    def told(self, session: str, what: str, state: str = "", step: int = 0, text: str = "") -> None:
        """The client heard something."""
        self.add(Told(self.now(), session, what, state, step, text))

    def error(self, text: str) -> None:
        """Something happened that no process foresaw."""
        if self.open:
            self.errors.append(f"{self.now():.3f} {text}")
            self.say(f"ERROR {text}")

    def visit(self, what: str) -> None:
        """A state or transition was seen."""
        if self.open:
            self.visited.add(what)

    def say(self, text: str) -> None:
        """A line of the trace, if there is one."""
        if self.trace is not None and self.open:
            self.trace.append(f"{self.now():9.3f} {text}")


def plain_fields(message: Message) -> dict[str, object]:
    """The fields of a message by name, nested ones as plain mappings and lists; tensors and bodies are left out."""
    if type(message) in (Hop, TieGradient, TieVersion):
        return {name: getattr(message, name) for name in _FIELDS[type(message)]}
    return {name: _plain(getattr(message, name)) for name in message.__struct_fields__ if name not in LEFT_OUT}


_FIELDS: dict[type[Message], list[str]] = {
    kind: [n for n in kind.__struct_fields__ if n not in LEFT_OUT] for kind in (Hop, TieGradient, TieVersion)
}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def digest_of_history(history: History) -> str:
    """Equal for equal histories, in whichever process they came about."""
    found = hashlib.sha256()
    for event in history.events:
        found.update(repr(event).encode())
    for part in (
        sorted(history.store.items()), sorted(history.objects), history.ended, history.waiting, history.errors,
        history.end_s, history.healed_s, sorted(history.visited),
    ):  # fmt: skip
        found.update(repr(part).encode())
    return found.hexdigest()

"""The link to the storage service, as questions that are answered or fail in the end.

The bus repeats what a line loses. What a lost process loses is asked again here, of the next one, under the same id. A
question fails when nothing at all has come from the service for `stall_s`: a slow line is no fault, and neither is a
store behind it that takes its time. So while nothing comes the service is asked whether it is there, which also finds
out that another process has taken its place. The first question fails sooner, for then nobody may be there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from storage.remote import SERVICE_ID
from storage.remote.answers import BUSY, error_of
from storage.store import Buffer, StoreError, StoreUnavailableError
from wire.bus import Bus
from wire.codec import read_body
from wire.errors import DCNRError, MisuseError, RemoteError, UnreachableError
from wire.ids import new_request_id
from wire.limits import LIMITS
from wire.messages import FORWARD, Message, Ok, OpenStore, PeerRef, StoreInfo
from wire.requests import RefusedError

STALL_S = 15.0
CONNECT_S = 10.0
ALIVE_S = 2.0
"""Nothing has come for so long: ask whether it is there."""
PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
ANSWER_S = 86_400.0
"""The bus's own deadline: ours end earlier."""

STORE_LIMITS = replace(LIMITS, ask_again_s=20.0)
"""For the bus to a storage service: an answer may be on a slow line for long, and is not to come twice."""

MakeBus = Callable[[], Bus]
T = TypeVar("T")


class _StalledError(Exception):
    """Nothing came for too long."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long nothing may come: from a service that has answered before, and from one that never has."""

    stall_s: float = STALL_S
    connect_s: float = CONNECT_S


class Connection:
    """See the module. `url`: for people. `make_bus`: called once, in the event loop that asks first.

    `key`: the service's public key, "" where there are no keys.
    """

    def __init__(self, url: str, address: str, make_bus: MakeBus, patience: Patience, key: str = "") -> None:
        self.url = url
        self.chunk_bytes = 0
        """The most that one message may bring; known once the service has answered."""
        self._address = address
        self._key = key
        self._make_bus = make_bus
        self._patience = patience
        self._bus: Bus | None = None
        self._boot = 0
        self._known = False  # it has answered before
        self._heard_at = 0.0
        self._opening = asyncio.Lock()
        self._closed = False
        self._looking: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Let go of the line. Idempotent."""
        self._closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()

    async def open(self) -> None:
        """Have an answer from the service, so that `chunk_bytes` is known. Raises StoreUnavailableError."""
        if not self.chunk_bytes:
            await self.ask(OpenStore(str(new_request_id())))

    async def body(self, message: Message, kind: type[T], frames: Sequence[Buffer] = (), *, key: str = "") -> T:
        """Ask, and read the body of the answer. Raises StoreError."""
        answer, got = await self.ask(message, frames, key=key)
        try:
            if not isinstance(answer, Ok) or len(got) != 1:
                raise RemoteError(f"{type(answer).__name__} with {len(got)} frames")
            found: T = read_body(got[0], kind)
        except RemoteError as error:
            raise self._odd(message, str(error), key) from error
        return found

    async def ask(
        self, message: Message, frames: Sequence[Buffer] = (), *, key: str = ""
    ) -> tuple[Message, Sequence[memoryview]]:
        """Ask, however often that takes. Raises StoreError's children, BadKeyError."""
        begun, tries, pause = self._now(), 0, PAUSE_S
        while True:
            try:
                bus, boot = await self._opened(begun)
                tries += 1
                peer = PeerRef(SERVICE_ID, boot, [self._address], self._key)
                return await self._wait(bus, peer, message, frames, begun)
            except RefusedError as error:
                if error.code != BUSY:
                    raise error_of(error, key, unsure=tries > 1) from error
                told = error.message
            except (UnreachableError, _StalledError) as error:
                self._boot, told = 0, str(error)
            left = self._left(begun)
            if left <= 0:
                raise self._away(message, key, told)
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left))
            pause = min(2 * pause, MAX_PAUSE_S)

    # ------------------------------------------------------------ inside

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _left(self, begun: float) -> float:
        """How long the question that was begun then may still wait for anything to come."""
        limit_s = self._patience.stall_s if self._known else self._patience.connect_s
        return max(begun, self._heard_at) + limit_s - self._now()

    async def _opened(self, begun: float) -> tuple[Bus, int]:
        """The bus, and the service's process on it."""
        async with self._opening:
            if self._closed:
                raise MisuseError(f"{self.url} is closed")
            if self._bus is None:
                try:
                    bus = self._make_bus()
                    await bus.start()
                except DCNRError as error:
                    raise StoreUnavailableError(f"{self.url}: {error.message}", hint=error.hint) from error
                self._bus = bus
            if not self._boot:
                question, whoever = OpenStore(str(new_request_id())), PeerRef(SERVICE_ID, 0, [self._address], self._key)
                answer, got = await self._wait(self._bus, whoever, question, (), begun)
                try:
                    if not isinstance(answer, Ok) or len(got) != 1:
                        raise RemoteError(f"{type(answer).__name__} with {len(got)} frames")
                    info = read_body(got[0], StoreInfo)
                    if not 1 <= info.chunk_bytes <= 1 << 20:
                        raise RemoteError(f"chunks of {info.chunk_bytes} bytes")
                except RemoteError as error:
                    raise self._odd(question, str(error), "") from error
                self._boot, self.chunk_bytes, self._known = info.boot, info.chunk_bytes, True
            return self._bus, self._boot

    async def _wait(
        self, bus: Bus, peer: PeerRef, message: Message, frames: Sequence[Buffer], begun: float
    ) -> tuple[Message, Sequence[memoryview]]:
        """Ask one process, and wait for as long as anything comes from it."""
        lane = FORWARD if frames else None
        asked = asyncio.ensure_future(bus.ask(peer, message, frames, timeout_s=ANSWER_S, lane=lane))
        try:
            while not asked.done():
                left = self._left(begun)
                if left <= 0:
                    raise _StalledError("nothing comes from it")
                await asyncio.wait([asked], timeout=min(left, ALIVE_S))
                if peer.boot and self._now() - max(begun, self._heard_at) >= ALIVE_S and not asked.done():
                    self._look(bus, peer)
            try:
                found = asked.result()
            except RefusedError as error:
                if error.code != BUSY:
                    self._heard_at = self._now()
                raise
            self._heard_at = self._now()
            return found
        finally:
            if not asked.done():
                asked.cancel()
                await asyncio.wait([asked])

    def _look(self, bus: Bus, peer: PeerRef) -> None:
        """See whether that process is there, unless that is being done."""

        async def look() -> None:
            try:
                await bus.ask(peer, OpenStore(str(new_request_id())), timeout_s=self._patience.stall_s)
            except (UnreachableError, RefusedError, MisuseError):
                return  # the questions that wait are told so themselves
            self._heard_at = self._now()

        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(look())

    def _away(self, message: Message, key: str, told: str) -> StoreUnavailableError:
        limit_s = self._patience.stall_s if self._known else self._patience.connect_s
        unsure = "; it may or may not happen later" if type(message).__name__ in _WRITES else ""
        return StoreUnavailableError(
            f"{self.url}: the storage service has given nothing for {limit_s:g} s ({told}){unsure}", key=key,
            hint="does it run, and is the line to it whole? (dcnr storage; dcnr up)",
        )  # fmt: skip

    def _odd(self, message: Message, text: str, key: str) -> StoreError:
        return StoreError(
            f"{self.url}: an odd answer to {type(message).__name__}: {text}", key=key,
            hint="do both sides run the same version?",
        )  # fmt: skip


_WRITES = frozenset({"StorePut", "StoreFinish", "StoreDelete"})

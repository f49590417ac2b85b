"""Every storage call of every operation fails, once and for ever, on the S3 server; and requests below the store do.

CI tries each call with one fault of both kinds, which a seed chooses, and a share of the requests; `DCNR_FULL=1` tries
all six faults of each call, and each request.
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage import CorruptError, PrefixStore, Store, StoreUnavailableError, open_store
from storage.local import LocalStore
from storage.remote.cache import BlobCache
from storage.s3 import open_s3
from storage.s3_retry import S3Limits
from tests.integration.storage.breaking_proxy import Exchange, breaking_proxy, canned
from tests.integration.storage.service import serving
from tests.seaweed import Seaweed
from tests.tried import TRIED
from tests.unit.storage.faulty import Crash, FaultyStore
from tests.unit.storage.operations import OPERATIONS, Operation, finish, judge
from tests.unit.storage.test_every_call import FAULTS

FULL = bool(os.environ.get("DCNR_FULL"))
SEED = int(os.environ.get("DCNR_SEED", "1"))
AT_ONCE = 4
MB = 1 << 20
FAST = S3Limits(attempts=3, wait_initial_s=0.01, wait_max_s=0.02, jitter_s=0.01, stall_s=5.0)


async def try_call(whole: Store, operation: Operation, fault: str, number: int) -> tuple[bool, object]:
    """One run with the fault at that call: whether it was reached, and what was found after it."""
    store = PrefixStore(whole, f"{uuid.uuid4().hex}/")
    await operation.before(store)
    faulty = FaultyStore(store, fail_at=number, **FAULTS[fault])  # type: ignore[arg-type]
    done = False
    try:
        await operation.run(faulty)
        done = True
    except (Crash, StoreUnavailableError):
        assert faulty.struck
    found = await judge(operation, store, done=done)
    await finish(operation, store)
    return faulty.struck, found


LASTING = [fault for fault, how in FAULTS.items() if how.get("lasting")]
KINDS = {"once": [fault for fault in FAULTS if fault not in LASTING], "for ever": LASTING}


@pytest.mark.parametrize("fault", FAULTS if FULL else KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_the_n_th_call_fails_for_every_n(s3_url: str, name: str, fault: str) -> None:
    print("seed", SEED)
    found = set()
    last = 0
    async with open_store(s3_url) as whole:

        async def one(number: int) -> bool:
            kind = fault if FULL else random.Random(f"{SEED}/{name}/{number}").choice(KINDS[fault])
            struck, what = await try_call(whole, OPERATIONS[name], kind, number)
            TRIED[name] += struck
            found.add(what)
            return struck

        while True:
            struck = await asyncio.gather(*(one(number) for number in range(last + 1, last + 1 + AT_ONCE)))
            last += AT_ONCE
            if not all(struck):
                break
    assert struck == sorted(struck, reverse=True)
    assert last > AT_ONCE or struck[1]
    assert OPERATIONS[name].new in found


def cut(exchange: Exchange) -> bytes:
    return exchange.reply_head + exchange.reply_body[: len(exchange.reply_body) // 2]


def flip(exchange: Exchange) -> bytes | None:
    """One bit of the body, where there is one."""
    if exchange.method != "GET" or not exchange.reply_body or "list-type" in exchange.path:
        return None
    at = exchange.total % len(exchange.reply_body)
    damaged = exchange.reply_body[at] ^ (1 << exchange.total % 8)
    return exchange.reply_head + exchange.reply_body[:at] + bytes([damaged]) + exchange.reply_body[at + 1 :]


@pytest.mark.parametrize("fault", KINDS)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_the_n_th_call_fails_before_or_behind_a_storage_service(tmp_path: Path, name: str, fault: str) -> None:
    """Some calls of each operation, drawn: on this side of the service, or of the store that it stands on."""
    print("seed", SEED)
    operation = OPERATIONS[name]
    found = set()
    for number in range(1, 200, 1 if FULL else 3):
        chance = random.Random(f"{SEED}/{name}/{number}")
        kind, behind = chance.choice(KINDS[fault]), chance.random() < 0.5
        if behind and FAULTS[kind]["crash"]:
            kind = "error once" if fault == "once" else "error for ever"  # a service that dies: test_remote.py
        folder = tmp_path / str(number)
        plain = LocalStore(folder / "store")
        await operation.before(plain)
        inner = FaultyStore(plain, fail_at=number if behind else 0, **FAULTS[kind])  # type: ignore[arg-type]
        inner.probe = plain.probe  # type: ignore[method-assign]
        async with (
            serving(inner, folder / "spool") as served,
            served.client(cache=BlobCache(folder / "c", MB)) as store,
        ):
            outer = FaultyStore(store, fail_at=0 if behind else number, **FAULTS[kind])  # type: ignore[arg-type]
            done = False
            try:
                await operation.run(outer)
                done = True
            except (Crash, StoreUnavailableError):
                assert inner.struck or outer.struck
            struck = inner.struck or outer.struck
            TRIED[f"{name} (service)"] += struck
            inner.fail_at = outer.fail_at = 0
            inner.struck = outer.struck = False
            found.add(await judge(operation, store, done=done))
            await finish(operation, store)
        if not struck:
            break
    assert number > 1 or found == {operation.new}


REQUEST_FAULTS = {
    "busy": ("before", lambda exchange: canned(503, "SlowDown")),
    "closed before": ("before", lambda exchange: b""),
    "reply lost": ("after", lambda exchange: b""),
    "body cut": ("after", cut),
    "bit flipped": ("after", flip),
}


SOME = ("save", "publish", "gc", "advance a record", "register a network", "delete a session")


@pytest.mark.parametrize("fault", REQUEST_FAULTS)
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for ever"])
async def test_requests_fail(s3_url: str, seaweed: Seaweed, fault: str, lasting: bool) -> None:
    """Below the store: a fault that does not last is not even noticed, one that lasts is an error and nothing worse."""
    print("seed", SEED)
    chance = random.Random(f"{SEED}/{fault}/{lasting}")
    side, answer = REQUEST_FAULTS[fault]
    noticed = 0
    async with (
        breaking_proxy(seaweed.endpoint) as proxy,
        open_store(s3_url) as whole,
        open_s3(urlsplit(s3_url.replace(seaweed.endpoint, proxy.endpoint)), FAST) as behind,
    ):

        async def try_request(operation: Operation, number: int) -> bool:
            """One run with the fault at that request: whether it was reached."""
            nonlocal noticed
            folder = f"{uuid.uuid4().hex}/"
            direct = PrefixStore(whole, folder)
            await operation.before(direct)
            first = proxy.total + number

            def strike(exchange: Exchange) -> bytes | None:
                hit = exchange.total == first or (lasting and exchange.total > first)
                return answer(exchange) if hit else None

            setattr(proxy, side, strike)
            done = False
            try:
                await operation.run(PrefixStore(behind, folder))
                done = True
            except (StoreUnavailableError, CorruptError):
                noticed += 1
                assert lasting
            setattr(proxy, side, lambda exchange: None)
            await judge(operation, direct, done=done)
            await finish(operation, direct)
            return proxy.total >= first

        for name in OPERATIONS if FULL else SOME:
            for number in range(1, 500) if FULL else chance.sample(range(1, 9), 2):
                struck = await try_request(OPERATIONS[name], number)
                TRIED[f"{name} (request)"] += struck
                if FULL and not struck:
                    break
    assert noticed > 0 if lasting and fault != "bit flipped" else noticed == 0 or lasting

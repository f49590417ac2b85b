"""Received tensors over real sockets: one copy of each, memory of its own, whatever is sent, changed or freed later."""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Sequence

import pytest
import torch

from pnode.tensors import Received, pack, unpack
from wire.limits import MIB
from wire.messages import DIRECTION_FORWARD, Hop, Message, PeerRef
from wire.zmq_bus import ZmqBus

pytestmark = pytest.mark.timeout(120)

SIZES = (1, 3, 16, 1000, 4095, 4096, 30_000, 65_536, 65_537, 300_000, MIB, MIB + 5)
"""In float32: below and above every limit at which wire treats memory differently (16, 128 and 256 KiB; 4 MiB)."""


def address(frame: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(frame))


async def test_every_tensor_has_memory_of_its_own_and_was_copied_once() -> None:
    a, b = ZmqBus("a", bind="tcp://127.0.0.1:0"), ZmqBus("b", bind="tcp://127.0.0.1:0")
    came: list[tuple[int, torch.Tensor]] = []
    longer: list[int] = []

    def take(sender: PeerRef, message: Message, frames: Sequence[memoryview]) -> None:
        assert isinstance(message, Hop)
        for frame, tensor in zip(frames, unpack(Received(message.tensors, frames)), strict=True):
            if address(frame) != tensor.data_ptr() or tensor.data_ptr() % 64:
                longer.append(tensor.numel())
            came.append((message.step, tensor))

    b.on_message(take)
    await a.start()
    await b.start()
    pick = random.Random(3)
    sent: dict[int, list[float]] = {}
    kept: dict[int, list[torch.Tensor]] = {}
    try:
        for number in range(120):
            values = [float(4 * number + place) for place in range(pick.randint(1, 3))]
            tensors = [torch.full((pick.choice(SIZES),), value) for value in values]
            packed = pack(tensors)
            a.send(b.me, Hop("s", 1, 0, number, 0, 0, DIRECTION_FORWARD, number, "a", 0, list(packed.metas)),
                   packed.frames)  # fmt: skip
            sent[number] = values
            async with asyncio.timeout(20):
                while len(came) < len(values) or a.queued_bytes(b.me):  # noqa: ASYNC110, the bus has no event for it
                    await asyncio.sleep(0.001)
            for tensor in tensors:
                tensor.fill_(-1.0)  # acknowledged: the sender may do what it likes with it
            kept[number] = [tensor for step, tensor in came if step == number]
            came.clear()
            for step in pick.sample(sorted(kept), min(3, len(kept))):
                changed = [value + 0.5 for value in sent[step]]
                for tensor in kept[step]:
                    tensor.add_(0.5)
                sent[step] = changed
            if len(kept) > 16:
                del kept[pick.choice(sorted(kept))]  # its memory may be used again
            for step, tensors in kept.items():
                for value, tensor in zip(sent[step], tensors, strict=True):
                    assert bool((tensor == value).all()), f"message {step} changed after message {number}"
    finally:
        await a.close()
        await b.close()
    assert not longer, f"copied again, or not aligned: tensors of {sorted(set(longer))}"

"""Keys and values per request: equal logits, a byte limit, a time to live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pnode.kvcache import CacheFull, CacheMiss, KVCache, KVCaches
from pnode.reference import Reference, train
from tests.golden.samples import GPT, Memory, read

VARIANTS = {"plain": [], "grouped-rotary": ["vars.heads=4", "vars.kv=2", "vars.rotary=true"]}


def trained(folder: Path, *sets: str) -> Reference:
    network = read(GPT, folder, *sets)
    return train(network, Memory(network), steps=4)


def logits(reference: Reference, tokens: torch.Tensor, cache: KVCache | None, position: int) -> torch.Tensor:
    _, made, _ = reference.executor.infer({}, {"tokens": tokens}, {"logits"}, cache, position)
    return made["logits"]


@pytest.mark.parametrize("chunks", [[1] * 16, [5, 1, 1, 4, 1, 1, 1, 1, 1], [16]], ids=str)
@pytest.mark.parametrize("sets", VARIANTS.values(), ids=list(VARIANTS))
def test_logits_with_a_cache_equal_those_without(sets: list[str], chunks: list[int], tmp_path: Path) -> None:
    reference = trained(tmp_path, *sets)
    tokens = Memory(reference.network).batch("train", 0, 0)["tokens"][:2]
    caches, position = KVCaches(1 << 20, 60.0), 0
    want = logits(reference, tokens, None, 0)
    for size in chunks:
        cache = caches.get("r", now_s=0.0)
        got = logits(reference, tokens[:, position : position + size], cache, position)
        position += size
        worst = float((got - want[:, position - size : position]).abs().max() / want.abs().max())
        assert worst <= 1e-5
    assert position == 16
    assert caches.size_bytes > 0


def test_a_cache_that_does_not_fit_the_position_is_refused(tmp_path: Path) -> None:
    reference = trained(tmp_path)
    caches = KVCaches(1 << 20, 60.0)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(CacheMiss, match="holds 0 positions, asked to go on at 3"):
        logits(reference, tokens, caches.get("r", 0.0), 3)
    logits(reference, tokens, caches.get("r", 0.0), 0)
    with pytest.raises(CacheMiss, match="holds 4 positions, asked to go on at 7"):
        logits(reference, tokens, caches.get("r", 0.0), 7)
    anew = logits(reference, tokens, caches.get("r", 0.0), 0)
    assert torch.equal(anew, logits(reference, tokens, None, 0))


def kv(positions: int) -> torch.Tensor:
    return torch.zeros(1, 2, positions, 4)


ENTRY_BYTES = 2 * 2 * 64 * 4 * 4  # keys and values, 2 heads, room for 64 positions, 4 wide, float32


def test_the_limit_makes_the_least_recently_used_give_way() -> None:
    caches = KVCaches(3 * ENTRY_BYTES, 60.0)
    for now, request in enumerate(("a", "b", "c")):
        caches.get(request, float(now)).extend("n", 0, kv(5), kv(5))
    assert caches.size_bytes == 3 * ENTRY_BYTES
    caches.get("a", 3.0).extend("n", 5, kv(1), kv(1))
    caches.get("d", 4.0).extend("n", 0, kv(5), kv(5))
    assert caches.size_bytes == 3 * ENTRY_BYTES
    with pytest.raises(CacheMiss):
        caches.get("b", 5.0).extend("n", 5, kv(1), kv(1))
    caches.get("a", 5.0).extend("n", 6, kv(1), kv(1))
    with pytest.raises(CacheFull, match="more than"):
        caches.get("e", 6.0).extend("n", 0, kv(64 * 4), kv(64 * 4))


def test_what_nobody_uses_is_dropped_after_its_time() -> None:
    caches = KVCaches(1 << 20, 10.0)
    caches.get("a", 0.0).extend("n", 0, kv(5), kv(5))
    caches.get("b", 8.0).extend("n", 0, kv(5), kv(5))
    caches.sweep(11.0)
    assert len(caches) == 1
    caches.drop("b")
    caches.drop("b")
    assert (len(caches), caches.size_bytes) == (0, 0)


def test_keys_and_values_survive_growth() -> None:
    cache = KVCaches(1 << 20, 10.0).get("a", 0.0)
    values = torch.arange(130.0).view(1, 1, 130, 1).expand(1, 1, 130, 4).contiguous()
    for position in range(130):
        step = values[:, :, position : position + 1]
        k, v = cache.extend("n", position, step, step + 1)
    assert torch.equal(k, values)
    assert torch.equal(v, values + 1)

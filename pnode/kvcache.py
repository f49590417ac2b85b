"""Keys and values of attention VNodes, kept per request, within a byte limit and a time to live.

Pure bookkeeping: time is passed in. A request whose cache is gone must send its whole prefix again, at position 0;
`CacheMiss` says so. Only the compute thread touches it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wire.errors import MisuseError

_FIRST_POSITIONS = 64


class CacheMiss(MisuseError):
    """The cache does not hold the positions before this one; send the whole prefix, at position 0."""


class CacheFull(MisuseError):
    """One request alone needs more than the limit."""


@dataclass(slots=True)
class _Entry:
    k_BHSE: Tensor
    v_BHSE: Tensor
    length: int


class KVCache:
    """What one request keeps in the attention VNodes of one PNode."""

    def __init__(self, request_id: str, reserve: Callable[[KVCache, int], None]) -> None:
        self.request_id = request_id
        self.size_bytes = 0
        self.used_s = 0.0
        self._reserve = reserve
        self._entries: dict[str, _Entry] = {}

    def extend(self, vnode: str, position: int, k_BHTE: Tensor, v_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values at `position` (0 starts anew) and return all so far.

        Raises CacheMiss if other positions are held, CacheFull if the limit forbids more.
        """
        entry = self._entries.get(vnode)
        if position == 0 and entry is not None:
            self._drop(vnode)
            entry = None
        held = entry.length if entry is not None else 0
        if position != held or (entry is not None and entry.k_BHSE.shape[0] != k_BHTE.shape[0]):
            raise CacheMiss(
                f"request {self.request_id}: '{vnode}' holds {held} positions, asked to go on at {position}",
                hint="send the whole prefix again, at position 0",
            )
        end = position + k_BHTE.shape[2]
        if entry is None or entry.k_BHSE.shape[2] < end:
            entry = self._grow(vnode, entry, end, k_BHTE)
        entry.k_BHSE[:, :, position:end] = k_BHTE
        entry.v_BHSE[:, :, position:end] = v_BHTE
        entry.length = end
        return entry.k_BHSE[:, :, :end], entry.v_BHSE[:, :, :end]

    def _grow(self, vnode: str, old: _Entry | None, end: int, like: Tensor) -> _Entry:
        room = _FIRST_POSITIONS
        while room < end:
            room *= 2
        b, h, _, e = like.shape
        more = 2 * b * h * e * (room - (old.k_BHSE.shape[2] if old is not None else 0)) * like.itemsize
        self._reserve(self, more)
        k = torch.zeros(b, h, room, e, dtype=like.dtype, device=like.device)
        v = torch.zeros_like(k)
        length = 0
        if old is not None:
            length = old.length
            k[:, :, :length] = old.k_BHSE[:, :, :length]
            v[:, :, :length] = old.v_BHSE[:, :, :length]
        self.size_bytes += more
        entry = self._entries[vnode] = _Entry(k, v, length)
        return entry

    def _drop(self, vnode: str) -> None:
        entry = self._entries.pop(vnode)
        self.size_bytes -= entry.k_BHSE.nbytes + entry.v_BHSE.nbytes


class KVCaches:
    """All requests' caches. The least recently used ones give way when the limit is reached."""

    def __init__(self, limit_bytes: int, time_to_live_s: float) -> None:
        self.limit_bytes, self.time_to_live_s = limit_bytes, time_to_live_s
        self._caches: dict[str, KVCache] = {}

    def get(self, request_id: str, now_s: float) -> KVCache:
        """The cache of a request, new if there is none; drops those that nobody used for the time to live."""
        self.sweep(now_s)
        cache = self._caches.get(request_id)
        if cache is None:
            cache = self._caches[request_id] = KVCache(request_id, self._reserve)
        cache.used_s = now_s
        return cache

    def drop(self, request_id: str) -> None:
        """Forget a request; nothing happens if it is unknown."""
        self._caches.pop(request_id, None)

    def sweep(self, now_s: float) -> None:
        """Drop what was not used for the time to live."""
        for request_id, cache in list(self._caches.items()):
            if now_s - cache.used_s > self.time_to_live_s:
                del self._caches[request_id]

    @property
    def size_bytes(self) -> int:
        """Bytes held by all requests."""
        return sum(cache.size_bytes for cache in self._caches.values())

    def __len__(self) -> int:
        return len(self._caches)

    def _reserve(self, cache: KVCache, more: int) -> None:
        if cache.size_bytes + more > self.limit_bytes:
            raise CacheFull(
                f"request {cache.request_id}: its keys and values need more than {self.limit_bytes} bytes",
                hint="generate fewer tokens, or raise the PNode's cache limit",
            )
        others = sorted((each for each in self._caches.values() if each is not cache), key=lambda each: each.used_s)
        while others and self.size_bytes + more > self.limit_bytes:
            self.drop(others.pop(0).request_id)

"""What every session of a PNode shares: the bus, the store, the orchestrator's address, limits, and counters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from pnode.relays import Relays
from storage.store import Store
from wire.admission import Admission
from wire.bus import Bus
from wire.messages import PeerRef


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of a PNode. Seconds and bytes; each is an option of `dcnr-pnode` or stated in docs."""

    wait_s: float = 900.0  # a running session may wait so long for a peer or the store
    compute_s: float = 900.0  # one action may compute so long
    stalled_s: float = 30.0  # from here on the heartbeat calls it stalled
    away_s: float = 86_400.0  # store or orchestrator may be away for so long before a run that waits for it fails
    cut_bytes: int = 1 << 30  # cuts of one session that the store does not have yet; two are always allowed
    infer_s: float = 60.0  # a forward request may be incomplete for so long
    infer_requests: int = 256  # forward requests of one session that are not complete
    infer_rows: int = 4096  # rows of the data that one forward request may name
    cache_bytes: int = 1 << 30  # KV caches of one session
    cache_s: float = 600.0  # an unused KV cache lives so long
    network_bytes: int = 64 << 20  # a network's description
    trace_writes: int = 8  # steps of trace that wait for the store


@dataclass(slots=True)
class Hub:
    """See the module. `spawn` runs a coroutine in the daemon's task group."""

    name: str
    bus: Bus
    orchestrator: PeerRef
    home: Path
    bounds: Bounds
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    log: structlog.typing.FilteringBoundLogger
    environment: list[str] = field(default_factory=list)
    admission: Admission | None = None  # where there are keys
    relays: Relays | None = None  # likewise
    store: Store | None = None
    store_url: str = ""
    clock: Callable[[], float] = time.monotonic  # uvloop's own counts whole milliseconds
    counters: Counter[str] = field(default_factory=Counter)
    step_seconds: Callable[[str, float], None] = lambda session, seconds: None

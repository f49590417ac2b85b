"""What a PNode finds out about its machine at start, and what it asks of the C library. Takes under a second."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import sys
import time

import psutil
import torch

from wire.messages import Profile

SIZE = 512
MEASURE_S = 0.3
LINK_BYTES_S = 1.5e9
LINK_LATENCY_S = 1e-4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_BYTES = 32 << 20
TRIM_BYTES = 256 << 20
SWITCH_S = 0.0005


def tune_process() -> None:
    """Keep freed memory in the process (page faults cost 5 %), and let the event loop have the GIL soon.

    Without glibc the first part is left out.
    """
    sys.setswitchinterval(SWITCH_S)
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)


def tune_thread(threads: int) -> None:
    """Set torch's thread count for the calling thread: OpenMP keeps it per thread."""
    torch.set_num_threads(threads)


def measure_flops(device: torch.device) -> float:
    """float32 operations per second of a square matrix product, at the calling thread's thread count."""
    a = torch.ones(SIZE, SIZE, device=device)
    b = torch.ones(SIZE, SIZE, device=device)
    _product(a, b, device)
    count, best, until = 0, float("inf"), time.perf_counter() + MEASURE_S
    while count < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        _product(a, b, device)
        best = min(best, time.perf_counter() - began)
        count += 1
    return 2.0 * SIZE**3 / best


def _product(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> None:
    torch.mm(a, b)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def cpu_name() -> str:
    """The processor's model, as far as the system tells."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def torch_build() -> str:
    """torch's version and the capability that its kernels use."""
    return f"{torch.__version__} {torch.backends.cpu.get_cpu_capability()}"


def memory_bytes(device: torch.device) -> int:
    """Memory of the device: what the machine (or its container) has available, or the GPU's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    available = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
        available = min(available, int(file.read()))
    return available


def make_profile(devices: list[torch.device], threads: int, flops: float, version: str) -> Profile:
    """The profile for the orchestrator."""
    return Profile(
        host=socket.gethostname(), device=",".join(str(device) for device in devices), threads=threads, flops=flops,
        memory_bytes=sum(memory_bytes(device) for device in devices), link_bytes_s=LINK_BYTES_S,
        link_latency_s=LINK_LATENCY_S, torch=torch_build(), cpu=cpu_name(), version=version,
    )  # fmt: skip


def environment(device: torch.device, threads: int) -> list[str]:
    """What bit-exact resume depends on."""
    return [f"torch {torch_build()}", f"device {device.type}", f"cpu {cpu_name()}", f"threads {threads}"]


def default_threads() -> int:
    """Cores that this process may use."""
    with contextlib.suppress(AttributeError):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1

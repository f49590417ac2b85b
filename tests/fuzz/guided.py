"""The same targets under atheris (libFuzzer), which keeps inputs that reach new code. An optional extra: `.[fuzz]`.

It sees the coverage of our Python only; msgpack, msgspec, safetensors and tokenizers are compiled. So it finds ways
through our checks, while the mutation engine, which knows the formats, is faster and repeats itself by its seed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.engine import MAX_BYTES, MAX_S, Figures, Memory, judge, keep_seed


def campaign(name: str, *, cases: int, seconds: float, seed: str) -> None:
    """Prints the figures as one line of JSON and ends the process, as libFuzzer never returns."""
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install -e '.[fuzz]'")

    with atheris.instrument_imports(include=["wire", "storage", "networks", "pnode", "cli"]):
        from tests.fuzz.targets import TARGETS

        target = TARGETS[name]
        corpus = target.valid()
        for data in corpus:
            judge(target, data)
    figures, memory, kinds = Figures(), Memory(), set[str]()
    started, held = time.perf_counter(), memory.begin()

    def end() -> None:
        figures.seconds = time.perf_counter() - started
        figures.largest_bytes = memory.grown(held)
        figures.too_large = int(figures.largest_bytes > MAX_BYTES)
        print(json.dumps(asdict(figures)), flush=True)
        os._exit(0)

    def one(data: bytes) -> None:
        begun = time.process_time()
        accepted, broke = judge(target, data)
        took_s = time.process_time() - begun
        figures.cases += 1
        figures.accepted += accepted
        figures.slowest_s = max(figures.slowest_s, took_s)
        figures.too_slow += took_s > MAX_S
        if broke:
            kind = broke.partition(": ")[0]
            figures.count(kind)
            if kind not in kinds:
                kinds.add(kind)
                figures.saved.append(keep_seed(name, data, broke))
        if figures.cases >= cases or time.perf_counter() - started >= seconds:
            end()

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(corpus):
            Path(folder, str(number)).write_bytes(data)
        number = int.from_bytes(seed.encode()[-3:], "big") or 1
        atheris.Setup([sys.argv[0], folder, f"-seed={number}", f"-max_len={target.max_bytes}", "-verbosity=0"], one)
        atheris.Fuzz()

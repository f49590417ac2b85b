"""What a user would run instead of DCNR: plain torch in one process, and torch.distributed.pipelining (1F1B, gloo).

The model is that of `benchmarks/gpt-4x256.yaml`; data are random tokens, since only speed is measured. One JSON
object is printed: step_ms (median of the steps after warm-up) and tokens_per_s.

    python benchmarks/pipeline_peers.py single --threads 2
    python benchmarks/pipeline_peers.py pipeline --ranks 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

WARM_STEPS = 5


class Attention(nn.Module):
    """Causal multi-head attention with one fused projection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x_BTD.shape
        split = [part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BTD).split(dim, 2)]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class Embedding(nn.Module):
    """Token and learned position embeddings."""

    def __init__(self, vocab: int, context: int, dim: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(context, dim)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]


def build(options: argparse.Namespace) -> list[nn.Module]:
    """The layers in order: embedding, blocks, head."""
    torch.manual_seed(0)
    blocks = [Block(options.dim, options.heads) for _ in range(options.layers)]
    head = nn.Sequential(nn.LayerNorm(options.dim, bias=False), nn.Linear(options.dim, options.vocab, bias=False))
    return [Embedding(options.vocab, options.context, options.dim), *blocks, head]


def draw(options: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and targets of one step."""
    generator = torch.Generator().manual_seed(step)
    shape = (options.batch * options.microbatches, options.context + 1)
    text = torch.randint(options.vocab, shape, generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy per token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tell(options: argparse.Namespace, marks: list[float]) -> None:
    """Print the median step time and the rate."""
    steps = [after - before for before, after in zip(marks[WARM_STEPS:], marks[WARM_STEPS + 1 :], strict=False)]
    median = statistics.median(steps)
    tokens = options.batch * options.microbatches * options.context
    print(json.dumps({"step_ms": round(median * 1e3, 2), "tokens_per_s": round(tokens / median)}), flush=True)


def single(options: argparse.Namespace) -> None:
    """One process, gradient accumulation over the microbatches."""
    torch.set_num_threads(options.threads)
    model = nn.Sequential(*build(options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    marks = [time.perf_counter()]
    for step in range(options.steps):
        x, y = draw(options, step)
        for x_part, y_part in zip(x.chunk(options.microbatches), y.chunk(options.microbatches), strict=True):
            loss = mean_loss(model(x_part), y_part) / options.microbatches
            loss.backward()
            loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
    tell(options, marks)


def rank(options: argparse.Namespace) -> None:
    """One rank of the torch pipeline."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", rank=options.rank, world_size=options.ranks, init_method=address)
    parts = build(options)
    first, last = (round(len(parts) * place / options.ranks) for place in (options.rank, options.rank + 1))
    model = nn.Sequential(*parts[first:last])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stage = PipelineStage(model, options.rank, options.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=options.microbatches, loss_fn=mean_loss)
    marks = [time.perf_counter()]
    for step in range(options.steps):
        x, y = draw(options, step)
        if options.rank == 0:
            schedule.step(x)
        elif options.rank == options.ranks - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
    if options.rank == options.ranks - 1:
        tell(options, marks)
    dist.barrier()
    dist.destroy_process_group()


def pipeline(options: argparse.Namespace) -> int:
    """Start all ranks of the torch pipeline and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, *sys.argv[1:], "--port", str(port), "--rank"]
    ranks = [subprocess.Popen([*command, str(place)], env=environment) for place in range(options.ranks)]
    return max(process.wait() for process in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["single", "pipeline"])
    numbers = {
        "layers": 4, "dim": 256, "heads": 8, "context": 128, "vocab": 512, "batch": 4, "microbatches": 8, "steps": 30,
        "threads": 2, "ranks": 2, "rank": -1, "port": 0,
    }  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if options.mode == "single":
        single(options)
    elif options.rank < 0:
        sys.exit(pipeline(options))
    else:
        rank(options)


if __name__ == "__main__":
    main()

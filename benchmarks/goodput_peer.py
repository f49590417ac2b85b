"""A rank of what a user would run instead of DCNR where machines fail: plain torch, data parallel over gloo.

The model is that of `networks/gpt-char.yaml` at its sizes, with random tokens, since only speed is measured. Started by
torchrun, which starts all ranks again when one dies; rank 0 saves every so many steps and all load the newest save.

    torchrun --standalone --nproc-per-node 4 --max-restarts 1000 benchmarks/goodput_peer.py FOLDER
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

LAYERS, DIM, HEADS, CONTEXT, VOCAB, BATCH = 4, 128, 4, 64, 96, 12


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, bias=False), nn.LayerNorm(DIM, bias=False)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        wide = self.qkv(self.norm1(x_BTD)).split(DIM, 2)
        split = [part.view(batch, length, HEADS, -1).transpose(1, 2) for part in wide]
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, DIM))
        return x_BTD + self.down(F.gelu(self.up(self.norm2(x_BTD))))


class Gpt(nn.Module):
    """Tied embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.blocks(self.token(tokens_BT) + self.position.weight)
        return F.linear(self.norm(x_BTD), self.token.weight)


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a whole or not at all."""
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as sink:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, sink)
        sink.flush()
        os.fsync(sink.fileno())
    fresh.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    saved, step = options.folder / "saved.pt", 0
    if saved.exists():
        found = torch.load(saved, weights_only=True)
        model.module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    with (options.folder / "steps").open("a") as told:
        while True:
            step += 1
            generator = torch.Generator().manual_seed(step * ranks + rank)
            text = torch.randint(VOCAB, (BATCH // ranks, CONTEXT + 1), generator=generator)
            logits = model(text[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0:
                if step % options.every == 0:
                    save(saved, step, model.module, optimizer)
                told.write(f"{step}\n")
                told.flush()


if __name__ == "__main__":
    main()

"""A pre-norm GPT in the manner of nanoGPT: learned positions, no biases, tied head."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention, then a perceptron, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(width, bias=False)
        self.ln2 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(d, dim=2))
        scores = q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
        y = (scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(b, t, d)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Model(nn.Module):
    """tokens (B, T) -> logits (B, T, 29)."""

    def __init__(self, vocab: int = 29, context: int = 16, width: int = 24, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


NAMES = {"tok": "tok", "pos": "pos", "ln_f": "ln_f"} | {
    f"h.{layer}.{ours}": f"blocks.{layer}.{theirs}"
    for layer in range(2)
    for ours, theirs in {"ln1": "ln1", "ln2": "ln2", "up": "up", "down": "down"}.items()
}
ATTENTION = {f"h.{layer}.attn": f"blocks.{layer}" for layer in range(2)}

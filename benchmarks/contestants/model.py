"""The model that all contestants train: a GPT in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass(frozen=True)
class Size:
    dim: int
    layers: int
    heads: int
    vocab: int
    context: int


SIZES = {
    "tiny": Size(dim=64, layers=2, heads=4, vocab=256, context=32),
    "bytes": Size(dim=128, layers=4, heads=4, vocab=256, context=64),  # as examples/bytelm
    "narrow": Size(dim=128, layers=24, heads=4, vocab=1024, context=32),  # many small tensors
    "s34": Size(dim=512, layers=8, heads=8, vocab=8192, context=64),  # 33.6 M parameters
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.dim)
        self.to_qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.to_out = nn.Linear(size.dim, size.dim, bias=False)
        self.mlp_norm = nn.LayerNorm(size.dim)
        self.up = nn.Linear(size.dim, 4 * size.dim)
        self.down = nn.Linear(4 * size.dim, size.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.to_qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.dim)
        self.positions = nn.Embedding(size.context, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(size: Size) -> GPT:
    torch.manual_seed(0)
    model = GPT(size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
    return model


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(size: Size, step: int, rows: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of a learnable text: each token follows from the one before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    column = torch.randint(size.vocab, (rows, 1), generator=generator)
    columns = [column]
    for _ in range(size.context):
        columns.append((columns[-1] * 31 + 7) % size.vocab)
    ids = torch.cat(columns, dim=1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

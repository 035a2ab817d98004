"""The model that every benchmark trains: a GPT with an untied head, and its seeded synthetic tokens.

At d_model 1024, 12 layers, vocabulary 8192 and 64 positions it has 167,999,488 parameters. Needs torch alone, so that
the same file also runs inside DeepSpeed's own virtual environment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class GPTShape:
    d_model: int = 1024
    num_layers: int = 12
    num_heads: int = 16
    vocabulary: int = 8192
    sequence: int = 64

    @property
    def layer_numel(self) -> int:
        """Parameters of one layer: 12·d² + 13·d."""
        return 12 * self.d_model**2 + 13 * self.d_model

    @property
    def largest_numel(self) -> int:
        """Elements of the largest parameter."""
        return max(4 * self.d_model, self.vocabulary) * self.d_model

    @property
    def numel(self) -> int:
        """Parameters of the layers, two vocabulary matrices, the positions and the last norm."""
        d = self.d_model
        return self.num_layers * self.layer_numel + 2 * self.vocabulary * d + self.sequence * d + 2 * d


INITIAL_STD = 0.02


class Linear(nn.Linear):
    """Initialised inside its own constructor: what shards parameters as they are built then sees final values."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INITIAL_STD)


class Block(nn.Module):
    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        d = shape.d_model
        self.num_heads = shape.num_heads
        self.norm_attention = nn.LayerNorm(d)
        self.qkv = Linear(d, 3 * d)
        self.project = Linear(d, d)
        self.norm_mlp = nn.LayerNorm(d)
        self.expand = Linear(d, 4 * d)
        self.contract = Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, d = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.num_heads, d // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, sequence, d))
        widened: Tensor = self.expand(self.norm_mlp(x))
        out: Tensor = x + self.contract(F.gelu(widened))
        return out


class GPT(nn.Module):
    """Next-token model: ``(batch, sequence + 1)`` int64 tokens in, mean cross entropy in nats (fp32 scalar) out."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = Embedding(shape.vocabulary, shape.d_model)
        self.positions = Embedding(shape.sequence, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.d_model)
        self.head = Linear(shape.d_model, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def token_batch(shape: GPTShape, *, step: int, batch: int = 1, seed: int = 0) -> Tensor:
    """``(batch, sequence + 1)`` int64 tokens, the same for the same (seed, step) on every machine."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.randint(shape.vocabulary, (batch, shape.sequence + 1), generator=generator)

"""The model that walks train: what of a model decides how weights come, stay and go, and can be told to go wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.walks.settings import Recipe

VOCABULARY = 11
ROWS, LENGTH = 2, 5


class Interrupted(BaseException):
    """What Ctrl-C is: no Exception."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(self.expand(self.norm(x))), 0.1, self.training)
        out: Tensor = x + self.contract(y)
        return out


class Walker(nn.Module):
    """Tokens to logits. ``branch`` is used while ``uses_branch``; ``base`` is never trained."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.branch = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(width, VOCABULARY, bias=not recipe.tied)
        if recipe.tied:
            self.head.weight = self.embed.weight
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.uses_branch = True
        self.goes_wrong = ""
        """Where the next call raises Interrupted: in "forward", or in "backward"."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        else:
            x = x - self.mean.to(x.dtype)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 0 and self.goes_wrong:
                x = self._go_wrong(x)
        x = x + torch.tanh(self.base(x))
        if self.uses_branch:
            x = x + self.branch(x)
        logits: Tensor = self.head(x * self.gain)
        return logits

    def _go_wrong(self, x: Tensor) -> Tensor:
        where, self.goes_wrong = self.goes_wrong, ""
        if where == "forward":
            raise Interrupted
        if x.requires_grad:
            x.register_hook(_interrupt)  # type: ignore[no-untyped-call]
        return x


def _interrupt(_gradient: Tensor) -> None:
    raise Interrupted


def groups_of(model: Walker) -> list[dict[str, Any]]:
    """What decays, and what does not."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]


def tokens_of(batch: int) -> Tensor:
    return torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(batch))


def loss_of(logits: Tensor, batch: int) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens_of(batch + 1000).flatten())


def values_like(param: Tensor, seed: int) -> Tensor:
    """fp32, of the parameter's shape."""
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * 0.2

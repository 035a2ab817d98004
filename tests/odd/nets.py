"""Small modules that the scripts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24
ROWS = 4


class Block(nn.Module):
    """Residual: norm, two linears."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


class Net(nn.Module):
    """Three blocks and a head; about 8,000 parameters."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Rule(nn.Module):
    """Two linears ``a`` and ``b`` between others, combined as a function says."""

    def __init__(self, rule: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.rule = rule

    def forward(self, x: Tensor) -> Any:
        return self.last(self.rule(self, self.first(x)))


def square(output: Any) -> Tensor:
    """A scalar loss of any output tensor, in fp32."""
    return torch.as_tensor(output).float().square().mean()


def batch(world: Any, step: int = 0) -> Tensor:
    """[ROWS, WIDTH], the same for a step every time."""
    tensor: Tensor = world.randn(ROWS, WIDTH, seed=step)
    return tensor


def loop(world: Any, engine: Any, num_steps: int = 2) -> None:
    """The usual loop over such batches."""
    world.train(engine, lambda step: square(engine(batch(world, step))), num_steps=num_steps)


class Made:
    """Makes an SGD of parameters, and keeps it."""

    optimizer: torch.optim.SGD

    def __call__(self, params: Any) -> torch.optim.SGD:
        self.optimizer = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
        return self.optimizer


def trains(world: Any, model: nn.Module, *, num_steps: int = 3, **kwargs: Any) -> Any:
    """Initialize and run the usual loop over random rows of WIDTH; gives the engine."""
    engine = world.initialize(model, **kwargs)
    num_batches = kwargs.get("accumulation", 1)
    for step in range(num_steps):
        for micro in range(num_batches):
            world.backward(engine, square(engine(world.randn(ROWS, WIDTH, seed=step * num_batches + micro))))
            engine.step()
    return engine

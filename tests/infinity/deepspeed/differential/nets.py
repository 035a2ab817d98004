"""Models, batches and configurations that many cases share, as small as their subject allows."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import Tensor, nn

from tests.infinity.deepspeed.differential.plain import PlainEngine

Config = dict[str, Any]
WIDTH = 12


class Stack(nn.Module):
    """Linear layers, and their loss against targets."""

    def __init__(self, width: int = WIDTH, depth: int = 2, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 3)
        if unused:
            self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).float(), y)


def stack(seed: int = 7, **options: Any) -> Stack:
    """The same weights every time."""
    torch.manual_seed(seed)
    return Stack(**options)


def batches(count: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """This rank's own."""
    generator = torch.Generator().manual_seed(100 + deepspeed.comm.get_rank())
    return [
        (torch.randn(4, width, generator=generator).to(dtype), torch.randint(3, (4,), generator=generator))
        for _ in range(count)
    ]


def config(stage: int = 0, lr: float = 0.05, **others: Any) -> Config:
    """``others`` replace or add sections; keys of ``zero_optimization`` in ``zero`` come on top of the stage."""
    zero = {"stage": stage, **others.pop("zero", {})}
    if stage == 3 and "param_persistence_threshold" not in zero:
        zero.setdefault("stage3_param_persistence_threshold", 0)
    adam = {"type": "Adam", "params": {"lr": lr, "torch_adam": True}}
    made = {"train_micro_batch_size_per_gpu": 4, "optimizer": adam, "zero_optimization": zero, **others}
    return {key: value for key, value in made.items() if value is not None}


MADE: list[PlainEngine] | None = None
"""Where a list stands, ``start`` makes engines of plain torch, and adds them to it."""


def start(model: nn.Module, given: Config, **others: Any) -> Any:
    """The engine."""
    if MADE is not None:
        MADE.append(PlainEngine(model, given, **others))
        return MADE[-1]
    others.setdefault("model_parameters", model.parameters())
    return deepspeed.initialize(model=model, config=given, **others)[0]


def train(engine: Any, steps: int = 3, dtype: torch.dtype = torch.float32) -> list[float]:
    """The loss of each micro-batch."""
    return train_on(engine, batches(steps, dtype=dtype))


def train_on(engine: Any, inputs: Iterable[tuple[Tensor, ...]]) -> list[float]:
    """The loss of each input, which the model returns."""
    losses = []
    for each in inputs:
        loss = engine(*each)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def weights(engine: Any) -> dict[str, Tensor]:
    """All of them, whole."""
    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values())):
        return {name: param.detach().float().clone() for name, param in params.items()}


def sums(engine: Any) -> dict[str, float]:
    """A number for each parameter."""
    return {name: value.double().sum().item() for name, value in weights(engine).items()}

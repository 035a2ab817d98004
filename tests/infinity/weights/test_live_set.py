"""The device tier's limits, seen from outside: how much is live at once, what is kept, what is released early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import infinity
from infinity.weights import placeholder
from infinity.weights.access import ShardedParameter

WIDTH = 200
LAYER_NUMEL = WIDTH * WIDTH
"""Of a dense layer without its bias, which is persistent."""


class Layer(nn.Module):
    """One group of LAYER_NUMEL elements; with an adapter, a frozen one beside small trainable ones."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False) if not frozen else nn.Linear(WIDTH, 1)
        self.frozen = frozen
        self.dense.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.dense(x))
        added: torch.Tensor = y * self.adapter(x) if self.frozen else self.adapter(y)
        return x + added


class Tower(nn.Module):
    def __init__(self, *, num_layers: int, frozen: bool, use_reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(frozen=frozen) for _ in range(num_layers)])
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.use_reentrant is None else checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def live_numel_peak(model: nn.Module, num_steps: int = 3, **zero: Any) -> int:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000, **zero},
    }
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        for _ in range(num_steps):
            engine.backward(engine(torch.ones(1, WIDTH, requires_grad=True)))
            engine.step()
        return engine.io_report().live_numel_peak


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_with_no_allowance_only_what_is_in_use_is_live(frozen: bool, use_reentrant: bool | None) -> None:
    """Also through frozen layers under checkpointing: six layers never add up."""
    model = Tower(num_layers=6, frozen=frozen, use_reentrant=use_reentrant)
    peak = live_numel_peak(model, stage3_max_live_parameters=0, stage3_max_reuse_distance=0)
    assert LAYER_NUMEL <= peak <= 3.5 * LAYER_NUMEL


def test_everything_stays_live_within_a_generous_limit() -> None:
    model = Tower(num_layers=4, frozen=False, use_reentrant=None)
    assert live_numel_peak(model) == sum(p.numel() for p in model.parameters() if p.numel() > 1000)


def test_live_parameters_stay_within_the_limit() -> None:
    model = Tower(num_layers=8, frozen=False, use_reentrant=None)
    limit = 5 * LAYER_NUMEL
    peak = live_numel_peak(model, stage3_max_live_parameters=limit, stage3_prefetch_bucket_size=LAYER_NUMEL)
    assert 3 * LAYER_NUMEL < peak <= limit


def test_a_sharded_parameter_keeps_its_shape_takes_no_memory_and_lends_its_weights() -> None:
    model = Tower(num_layers=2, frozen=False, use_reentrant=None)
    before = [p.detach().clone() for p in model.parameters()]
    shapes = [p.shape for p in model.parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000},
    }
    with infinity.initialize(model=model, config=config)[0]:
        assert [p.shape for p in model.parameters()] == shapes
        sharded = [p for p in model.parameters() if p.numel() > 1000]
        assert sharded
        assert all(isinstance(p, ShardedParameter) for p in sharded)
        assert all(torch.equal(param, value) for param, value in zip(model.parameters(), before, strict=True))
        assert all(placeholder.is_held_by(p) for p in sharded)
        assert all(torch.isfinite(p).all() for p in model.parameters() if p.numel() <= 1000), (
            "persistent ones are whole"
        )

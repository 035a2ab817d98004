"""Weights that are not used in every step, or not until its end: they get their own step's update, and do not stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine

WIDTH = 48
BATCH = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def engine_of(model: nn.Module, *, io_daemon: dict[str, Any] | None = None, **zero: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "io_daemon": io_daemon or {},
    }
    return infinity.initialize(model=model, config=config)[0]


def take_step(engine: Engine) -> None:
    engine.backward(engine(BATCH).square().mean())
    engine.step()


class Frozen(nn.Module):
    """Backward needs the weights of frozen layers, and gives them no gradient, as under LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.base = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
        self.base.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.base(self.adapter(inputs))
        return outputs


def test_frozen_weights_that_backward_is_done_with_do_not_stay() -> None:
    with engine_of(Frozen(), stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0) as engine:
        for _ in range(2):
            take_step(engine)
        assert engine._runtime.live_set.live_numel_peak <= 3 * (WIDTH * WIDTH + WIDTH)


class Seldom(nn.Module):
    """``seldom`` is used in the first step alone, and only a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.seldom = nn.Linear(WIDTH, WIDTH)
        self.uses = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        self.uses += 1
        if self.uses in (1, 4):
            hidden = hidden + nn.functional.linear(inputs, self.seldom.weight)
        return hidden


@pytest.mark.parametrize("early", [False, True])
def test_what_is_due_of_weights_that_the_next_step_does_not_use_is_done_by_their_own_step(early: bool) -> None:
    found = []
    for how in ({"update": "in_step"}, {"update": "on_use", "update_in_backward": early}):
        torch.manual_seed(0)
        with engine_of(
            Seldom(), io_daemon=how, stage3_max_live_parameters=0, stage3_prefetch_bucket_size=WIDTH * WIDTH
        ) as engine:
            for _ in range(5):
                take_step(engine)
            found.append(engine.full_state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])

"""Weights that no one reads before their next update are not kept; whoever reads them all the same sees their bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from infinity.utils import safe_get_full_fp32_param
from tests.support.reference import differing_bits

WIDTH, DEPTH = 128, 6
LAYER = WIDTH * WIDTH + WIDTH
NUM_STEPS_MAX = 300

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.to(self.get_parameter("layers.0.weight").dtype)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return hidden.float().square().mean()


@contextmanager
def engine_of(directory: Path, tier: str, *, live: int = 0, **changes: Any) -> Iterator[Engine]:
    offload = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": live,
            "stage3_prefetch_bucket_size": LAYER,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"host_budget_bytes": 600 << 10},
        **changes,
    }
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Net(), config=config)
    try:
        yield engine
    finally:
        engine.destroy()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def train(engine: Engine, first: int, last: int) -> list[torch.Tensor]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return losses


def train_on(engine: Engine) -> list[torch.Tensor]:
    return train(engine, 50, 51)


def evaluate(engine: Engine) -> list[torch.Tensor]:
    engine.eval()
    with torch.no_grad():
        loss = engine(batch(99)).clone()
    engine.train()
    return [loss]


def backward_twice(engine: Engine) -> list[torch.Tensor]:
    losses = []
    for step in (50, 51):
        loss = engine(batch(step))
        engine.backward(loss)
        losses.append(loss.detach().clone())
    engine.zero_grad()
    return losses


def gather_within_a_step(engine: Engine) -> list[torch.Tensor]:
    loss = engine(batch(50))
    engine.backward(loss)
    weight = engine.module.get_parameter("layers.2.weight")
    with infinity.zero.GatheredParameters(weight):
        found = weight.detach().clone()
    engine.step()
    return [loss.detach().clone(), found]


def gather_between_steps(engine: Engine) -> list[torch.Tensor]:
    weight = engine.module.get_parameter("layers.2.weight")
    with infinity.zero.GatheredParameters(weight, modifier_rank=0):
        found = weight.detach().clone()
        weight.data[3] = 0.25
    return [found]


def write_within_a_step(engine: Engine) -> list[torch.Tensor]:
    loss = engine(batch(50))
    engine.backward(loss)
    weight = engine.module.get_parameter("layers.2.weight")
    with infinity.zero.GatheredParameters(weight, modifier_rank=0):
        weight.data[3] = 0.25
    engine.step()
    return [loss.detach().clone()]


def other_layers(engine: Engine) -> list[torch.Tensor]:
    """A step in which the last layers have no gradient: they are not updated, and were not read either."""
    layer = engine.module.get_submodule("layers.0")
    loss = layer(batch(50).to(torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return [loss.detach().clone()]


def masters(engine: Engine) -> list[torch.Tensor]:
    found = [safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    return [value for value in found if value is not None]


@pytest.mark.parametrize("live", [0, 100 * LAYER])
@pytest.mark.parametrize(
    "interlude", [evaluate, backward_twice, gather_within_a_step, write_within_a_step, other_layers]
)
def test_whoever_reads_them_after_all_sees_the_same_bits(
    interlude: Callable[[Engine], list[torch.Tensor]], live: int, tmp_path: Path
) -> None:
    found = []
    for tier in ("none", "nvme"):
        with engine_of(tmp_path, tier, live=live) as engine:
            seen = train(engine, 0, 4)
            for first in (4, 6):
                seen += interlude(engine) + train(engine, first, first + 2)
            found.append(seen + evaluate(engine) + masters(engine))
    assert len(found[0]) == len(found[1])
    assert sum(differing_bits(*pair) for pair in zip(*found, strict=True)) == 0


@pytest.mark.parametrize("live", [0, 100 * LAYER])
@pytest.mark.parametrize("interlude", [train_on, evaluate, gather_between_steps, other_layers])
def test_an_update_inside_backward_keeps_none_and_everybody_sees_the_same_bits(
    interlude: Callable[[Engine], list[torch.Tensor]], live: int, tmp_path: Path
) -> None:
    found = []
    for tier in ("none", "nvme"):
        section = {"host_budget_bytes": 600 << 10, "update_in_backward": True}
        with engine_of(tmp_path, tier, live=live, gradient_clipping=0.0, io_daemon=section) as engine:
            seen = train(engine, 0, 4)
            for first in (4, 6):
                seen += interlude(engine) + train(engine, first, first + 2)
            moved = engine.io_report().nvme
            if tier == "nvme" and interlude is train_on:
                assert moved is not None
                assert (moved.bytes_written["weight"], moved.bytes_read["weight"]) == (0, 0)
            found.append(seen + evaluate(engine) + masters(engine))
    assert len(found[0]) == len(found[1])
    assert sum(differing_bits(*pair) for pair in zip(*found, strict=True)) == 0


@pytest.mark.parametrize("live", [0, 100 * LAYER])
def test_in_the_steady_state_no_weight_is_written_to_the_disk_nor_read_from_it(live: int, tmp_path: Path) -> None:
    """Where there is room for the weights from their update to their last read: with less it is as cheap to write a
    weight as a master, and a plan may choose either."""
    with engine_of(tmp_path, "nvme", live=live, io_daemon={"host_budget_bytes": 1400 << 10}) as engine:
        num_steps_without = 0
        for step in range(NUM_STEPS_MAX):  # a plan comes from another process, some steps after the order is known
            train(engine, step, step + 1)
            moved = engine.io_report().nvme
            assert moved is not None
            written, weights = moved.bytes_written, (moved.bytes_written["weight"], moved.bytes_read["weight"])
            num_steps_without = num_steps_without + 1 if weights == (0, 0) else 0
            if num_steps_without == 10:
                break
        assert written["master"] > 0  # the state does not fit
        assert weights == (0, 0)


def test_halves_of_masters_are_weights_and_stay(tmp_path: Path) -> None:
    section = {"host_budget_bytes": 600 << 10}
    found = []
    for tier, kept in (("none", {}), ("nvme", {"master_weights": "split"})):
        with engine_of(tmp_path, tier, io_daemon={**section, **kept}) as engine:
            found.append(train(engine, 0, 5) + masters(engine))
    assert sum(differing_bits(*pair) for pair in zip(*found, strict=True)) == 0

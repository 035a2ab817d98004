"""Gradients wait for their update where the weights were, as far as the live limit goes; beyond it they stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import Engine
from tests.infinity.test_warm_memory import settled_bytes
from tests.support.reference import differing_bits

WIDTH, DEPTH = 256, 6
LAYER = WIDTH * WIDTH + WIDTH
NUMEL = DEPTH * LAYER
BATCH = 4

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(
    directory: Path, live: int, *, tier: str = "nvme", accumulation: int = 1, reuse: int = 1 << 30, **daemon: Any
) -> Engine:
    offload = {"device": tier} | ({"nvme_path": str(directory)} if tier == "nvme" else {})
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.1,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": reuse,
            "stage3_prefetch_bucket_size": LAYER,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"host_budget_bytes": 2 << 20, **daemon},
    }
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    return infinity.initialize(model=model, config=config)[0]


def backward(engine: Engine, number: int) -> torch.Tensor:
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
    loss: torch.Tensor = engine(inputs).float().square().mean()
    engine.backward(loss)
    return loss.detach()


def train(engine: Engine, num_steps: int, accumulation: int = 1) -> list[torch.Tensor]:
    losses = []
    for number in range(num_steps * accumulation):
        losses.append(backward(engine, number))
        engine.step()
    return losses


def gradient_bytes_on_device(engine: Engine) -> float:
    return engine._runtime.store.stats().get("resident_bytes", 0.0)


@pytest.mark.parametrize(
    ("accumulation", "gradient_bytes", "live", "stays"),
    [
        (1, 2, 2 * NUMEL, True),
        (1, 2, 2 * NUMEL - 1, False),
        (2, 4, 3 * NUMEL, True),  # sums of micro-batches are fp32, beside weights of two bytes
        (2, 4, 3 * NUMEL - 1, False),
    ],
)
def test_gradients_stay_as_far_as_the_live_limit_goes(
    accumulation: int, gradient_bytes: int, live: int, stays: bool, tmp_path: Path
) -> None:
    with engine_of(tmp_path, live, accumulation=accumulation) as engine:
        for number in range(accumulation):
            backward(engine, number)
            if number < accumulation - 1:
                engine.step()
        assert gradient_bytes_on_device(engine) == (gradient_bytes * NUMEL if stays else 0)
        engine.step()
        backward(engine, 9)
        engine.zero_grad()
        report = engine.io_report().as_dict()
    streamed = [kinds["grad"] for kinds in _named(report, "bytes_written") if "grad" in kinds]
    assert not stays or not any(streamed)


def test_gradients_of_weights_that_go_after_each_use_stream(tmp_path: Path) -> None:
    with engine_of(tmp_path, 1 << 30, reuse=0) as engine:
        backward(engine, 0)
        assert gradient_bytes_on_device(engine) == 0
        engine.zero_grad()


def _named(tree: Any, name: str) -> list[dict[str, int]]:
    """Whatever a report has under the name, at any depth."""
    if not isinstance(tree, dict):
        return []
    found = [tree[name]] if isinstance(tree.get(name), dict) else []
    return found + [each for value in tree.values() for each in _named(value, name)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("daemon", [{}, {"master_weights": "split"}, {"update": "in_step"}], ids=str)
def test_no_bit_depends_on_where_gradients_wait(accumulation: int, daemon: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for tier, live in (("none", 1 << 30), ("nvme", 1 << 30), ("nvme", 0)):
        options = daemon if tier == "nvme" else {}
        with engine_of(tmp_path, live, tier=tier, accumulation=accumulation, **options) as engine:
            found.append((train(engine, 4, accumulation), engine.full_master_state_dict()))
    for losses, masters in found[1:]:
        assert all(map(torch.equal, losses, found[0][0]))
        assert all(differing_bits(masters[name], value) == 0 for name, value in found[0][1].items())


def test_a_step_moves_fewer_bytes_where_gradients_stay(tmp_path: Path) -> None:
    moved = []
    for live in (1 << 30, 2 * NUMEL - 1):
        with engine_of(tmp_path, live) as engine:
            train(engine, 6)
            before = _bytes_moved(engine)
            train(engine, 4)
            moved.append((_bytes_moved(engine) - before) / 4)
    assert moved[0] < moved[1] - NUMEL * 2, "each was written and read, but for what the arena kept"


def _bytes_moved(engine: Engine) -> int:
    totals = engine._runtime.sharded.host_store.tenant_stats().total  # type: ignore[union-attr]
    return sum(totals.bytes_read) + sum(totals.bytes_written)


def test_gradients_take_the_memory_that_weights_had(tmp_path: Path) -> None:
    wide, depth = 1024, 12
    layer = wide * wide * 2
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": wide * wide,
            "offload_param": offload,
            "offload_optimizer": offload,
        },
        "io_daemon": {"host_budget_bytes": 64 << 20},
    }
    model = nn.Sequential(*(nn.Linear(wide, wide, bias=False) for _ in range(depth)))
    with infinity.initialize(model=model, config=config)[0] as engine:
        before = settled_bytes()
        for step in range(8):
            inputs = torch.randn(2, wide, generator=torch.Generator().manual_seed(step)).bfloat16()
            engine.backward(engine(inputs).square().mean())
            engine.step()
        grown = settled_bytes() - before
    assert grown < (depth + 6) * layer + (8 << 20), "not the weights' and the gradients', which are twice as much"

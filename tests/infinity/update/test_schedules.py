"""The schedules against DeepSpeed's formulas, written out here in the form DeepSpeed counts: iterations from -1."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.config import parse_config
from infinity.update.schedules import (
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    WarmupType,
    build_schedule,
    warmup_progress,
)

NUM_UPDATES = 40
BASE_LRS = (3e-3, 7e-4)


def _optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr} for lr in BASE_LRS]
    return torch.optim.AdamW(groups)


def _rates(schedule: torch.optim.lr_scheduler.LRScheduler) -> list[list[float]]:
    """The rates that each of NUM_UPDATES updates runs at, one list per update."""
    rates = []
    for _ in range(NUM_UPDATES):
        rates.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return rates


def _gamma(iteration: int, num_steps: int, kind: WarmupType) -> float:
    if iteration < num_steps:
        return math.log(iteration + 1) / math.log(num_steps) if kind == "log" else iteration / num_steps
    return 1.0


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_warmup(kind: WarmupType) -> None:
    low, high, num_steps = 1e-5, 2e-3, 12
    rates = _rates(
        WarmupLR(_optimizer(), warmup_min_lr=low, warmup_max_lr=high, warmup_num_steps=num_steps, warmup_type=kind)
    )
    for update, pair in enumerate(rates):
        gamma = 0.0 if update == 0 else _gamma(update - 1, num_steps, kind)
        assert pair == pytest.approx([low + (high - low) * gamma] * 2, rel=1e-12)
    assert rates[-1] == [high, high]
    own = _rates(WarmupLR(_optimizer(), warmup_min_lr=low, warmup_num_steps=num_steps, warmup_type=kind))
    assert own[-1] == pytest.approx(list(BASE_LRS), rel=1e-12)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_decay(kind: WarmupType) -> None:
    low, high, num_steps, total = 1e-5, 2e-3, 10, 30

    def gamma(iteration: int) -> float:
        if iteration < num_steps:
            return _gamma(iteration, num_steps, kind)
        return max(0.0, (total - iteration) / max(1.0, total - num_steps))

    schedule = WarmupDecayLR(
        _optimizer(),
        total_num_steps=total,
        warmup_min_lr=low,
        warmup_max_lr=high,
        warmup_num_steps=num_steps,
        warmup_type=kind,
    )
    rates = _rates(schedule)
    for update, pair in enumerate(rates):
        expected = low + (high - low) * (0.0 if update == 0 else gamma(update - 1))
        assert pair == pytest.approx([expected] * 2, rel=1e-12)
    assert rates[total + 1] == [low, low]


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("total", [30, 8])
def test_cosine(kind: WarmupType, total: int) -> None:
    """Also where the warm-up is longer than the whole run: the rate stays at its floor."""
    start, end, num_steps = 0.1, 0.02, 10

    def ratio(iteration: int) -> float:
        if iteration < num_steps:
            return start + (1 - start) * _gamma(iteration, num_steps, kind)
        done = min(1.0, (iteration - num_steps + 1) / max(1, total - num_steps))
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2

    schedule = WarmupCosineLR(
        _optimizer(),
        total_num_steps=total,
        warmup_min_ratio=start,
        warmup_num_steps=num_steps,
        cos_min_ratio=end,
        warmup_type=kind,
    )
    rates = _rates(schedule)
    for update, pair in enumerate(rates):
        factor = 0.0 if update == 0 else ratio(update - 1)
        assert pair == pytest.approx([lr * factor for lr in BASE_LRS], rel=1e-12)
    assert rates[-1] == pytest.approx([lr * end for lr in BASE_LRS])


def test_a_warm_up_has_at_least_two_steps() -> None:
    assert warmup_progress(0, 1, "log") == 0.0
    assert warmup_progress(1, 1, "log") == 1.0
    assert warmup_progress(1, 1, "linear") == 0.5


CASES: list[tuple[str, dict[str, Any], type]] = [
    ("WarmupLR", {"warmup_num_steps": 5}, WarmupLR),
    ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 20}, WarmupDecayLR),
    ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 20}, WarmupCosineLR),
]


def _build(name: str, params: dict[str, Any]) -> torch.optim.lr_scheduler.LRScheduler:
    config = parse_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {"stage": 3},
            "scheduler": {"type": name, "params": params},
        }
    )
    assert config.scheduler is not None
    return build_schedule(config.scheduler, _optimizer())


@pytest.mark.parametrize(("name", "params", "expected"), CASES, ids=[case[0] for case in CASES])
def test_built_from_the_configuration(name: str, params: dict[str, Any], expected: type) -> None:
    schedule = _build(name, params)
    assert type(schedule) is expected
    direct: Callable[..., torch.optim.lr_scheduler.LRScheduler] = expected
    assert _rates(schedule) == _rates(direct(_optimizer(), **params))


@pytest.mark.parametrize(("name", "params"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_state_dict_resumes_at_the_same_rate(name: str, params: dict[str, Any]) -> None:
    schedule, resumed = _build(name, params), _build(name, params)
    reference = _rates(_build(name, params))
    for _ in range(7):
        schedule.optimizer.step()
        schedule.step()
    resumed.load_state_dict(schedule.state_dict())
    resumed.optimizer.step()
    resumed.step()
    assert [group["lr"] for group in resumed.optimizer.param_groups] == reference[8]

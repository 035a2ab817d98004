"""The schedules against DeepSpeed's documented formulas, written out here by update instead of by iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from infinity.config import parse_config
from infinity.errors import ConfigError
from infinity.update.schedules import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupLR,
    build_schedule,
    warmup_progress,
)

NUM_UPDATES = 1000
BASE_LRS = (3e-3, 7e-4)
Formula = Callable[[int, float], float]
"""(update from 0 on, the param group's own rate) -> the rate that this update runs at."""


def _optimizer(kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(3))], "lr": lr} for lr in BASE_LRS]
    return kind(groups)  # type: ignore[call-arg]


def test_a_schedule_shows_what_torchs_own_show() -> None:
    section: Any = parse_config({"train_batch_size": 1, "scheduler": {"type": "WarmupLR"}}).scheduler
    own: Any = build_schedule(section, _optimizer())
    torchs: Any = torch.optim.lr_scheduler.LambdaLR(_optimizer(), lambda epoch: 1.0)
    for _ in range(3):
        assert (own.last_epoch, own._step_count) == (torchs.last_epoch, torchs._step_count)
        for schedule in (own, torchs):
            schedule.optimizer.step()
            schedule.step()


def _rates(schedule: torch.optim.lr_scheduler.LRScheduler, num_updates: int = NUM_UPDATES) -> list[list[float]]:
    """The rates that each update runs at, one list per update."""
    rates = []
    for _ in range(num_updates):
        rates.append([float(group["lr"]) for group in schedule.optimizer.param_groups])
        schedule.step()
    return rates


def _risen(update: int, num_steps: int, kind: str) -> float:
    """Share of a warm-up that is done. The first two updates both run at its start."""
    done = max(0, update - 1)
    if done >= num_steps:
        return 1.0
    return math.log(done + 1, num_steps) if kind == "log" else done / num_steps


def _warmup(low: float, high: float | None, num_steps: int, kind: str) -> Formula:
    return lambda update, own: low + ((own if high is None else high) - low) * _risen(update, num_steps, kind)


def _decay(low: float, high: float, num_steps: int, total: int, kind: str) -> Formula:
    def rate(update: int, own: float) -> float:
        if update - 1 < num_steps:
            return _warmup(low, high, num_steps, kind)(update, own)
        left = max(0, total - (update - 1)) / max(1, total - num_steps)
        return low + (high - low) * left

    return rate


def _cosine(start: float, end: float, num_steps: int, total: int, kind: str) -> Formula:
    def rate(update: int, own: float) -> float:
        if update == 0:
            return 0.0
        if update - 1 < num_steps:
            return own * (start + (1 - start) * _risen(update, num_steps, kind))
        turned = min(1.0, (update - num_steps) / max(1, total - num_steps))
        return own * (end + (1 - end) * (1 + math.cos(turned * math.pi)) / 2)

    return rate


def _range(low: float, step_size: int, share: float, *, stairs: bool) -> Formula:
    return lambda update, _own: low * (1 + share * (update // step_size if stairs else update / step_size))


def _height(update: int, first: int, second: int, stairs: tuple[int, int] = (0, 0)) -> float:
    position = update % (first + second)
    along, half, num_stairs = (
        (position, first, stairs[0]) if position <= first else (first + second - position, second, stairs[1])
    )
    return math.floor(along * num_stairs / half) / num_stairs if num_stairs else along / half


def _cycle(
    low: float,
    high: float,
    first: int,
    second: int,
    *,
    stairs: tuple[int, int] = (0, 0),
    decay: tuple[int, float] = (0, 0),
) -> Formula:
    def rate(update: int, _own: float) -> float:
        after = update - (first + second)
        if after <= 0:
            return low + (high - low) * _height(update, first, second, stairs)
        every, share = decay
        return low / (1 + share * after / every) if every else low

    return rate


CASES: list[tuple[str, dict[str, Any], Formula]] = [
    ("WarmupLR", {}, _warmup(0.0, None, 1000, "log")),
    (
        "WarmupLR",
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 312, "warmup_type": "linear"},
        _warmup(1e-5, 2e-3, 312, "linear"),
    ),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear"}, _warmup(0.0, None, 2, "linear")),
    ("WarmupDecayLR", {"total_num_steps": 800, "warmup_num_steps": 90}, _decay(0.0, 1e-3, 90, 800, "log")),
    (
        "WarmupDecayLR",
        {"total_num_steps": 60, "warmup_num_steps": 90, "warmup_min_lr": 1e-5, "warmup_type": "linear"},
        _decay(1e-5, 1e-3, 90, 60, "linear"),
    ),
    ("WarmupCosineLR", {"total_num_steps": 800, "warmup_num_steps": 90}, _cosine(0.0, 1e-4, 90, 800, "log")),
    (
        "WarmupCosineLR",
        {"total_num_steps": 60, "warmup_num_steps": 90, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.02},
        _cosine(0.1, 0.02, 90, 60, "log"),
    ),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}, _cycle(1e-4, 1e-3, 2000, 2000)),
    (
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 100,
            "cycle_second_step_size": 333,
            "decay_step_size": 7,
            "decay_lr_rate": 0.01,
        },
        _cycle(1e-4, 1e-3, 100, 333, decay=(7, 0.01)),
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.0,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": 200,
            "cycle_second_step_size": 300,
            "cycle_first_stair_count": 7,
            "cycle_second_stair_count": 3,
        },
        _cycle(0.0, 1e-3, 200, 300, stairs=(7, 3)),
    ),
    ("LRRangeTest", {}, _range(1e-3, 2000, 1.0, stairs=False)),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": 1e-4,
            "lr_range_test_step_size": 70,
            "lr_range_test_step_rate": 0.5,
            "lr_range_test_staircase": True,
        },
        _range(1e-4, 70, 0.5, stairs=True),
    ),
]
NAMES = [f"{name}{number}" for number, (name, _, _) in enumerate(CASES)]


def _build(name: str, params: dict[str, Any]) -> Schedule:
    """As the configuration builds it."""
    config = parse_config(
        {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "scheduler": {"type": name, "params": params}}
    )
    assert config.scheduler is not None
    schedule = build_schedule(config.scheduler, _optimizer())
    assert isinstance(schedule, Schedule)
    return schedule


@pytest.mark.parametrize(("name", "params", "formula"), CASES, ids=NAMES)
def test_a_thousand_updates_run_at_the_documented_rates(name: str, params: dict[str, Any], formula: Formula) -> None:
    schedule = _build(name, params)
    assert type(schedule) is SCHEDULES[name]
    for update, rates in enumerate(_rates(schedule)):
        assert rates == pytest.approx([formula(update, own) for own in BASE_LRS], rel=1e-12, abs=0)


def test_every_schedule_is_covered() -> None:
    assert {name for name, _, _ in CASES} == set(SCHEDULES)


@pytest.mark.parametrize(("name", "params"), [case[:2] for case in CASES], ids=NAMES)
def test_a_schedule_without_a_configuration_is_the_same(name: str, params: dict[str, Any]) -> None:
    assert _rates(_build(name, params), 50) == _rates(SCHEDULES[name](_optimizer(), **params), 50)


# --- momentum


def _betas(schedule: Schedule, num_updates: int) -> list[list[tuple[float, float]]]:
    betas = []
    for _ in range(num_updates):
        betas.append([tuple(group["betas"]) for group in schedule.optimizer.param_groups])
        schedule.step()
    return betas


def test_momentum_goes_against_the_rate_and_grows_after_the_cycle() -> None:
    up, down, low, high = 100, 200, 0.8, 0.95
    schedule = _build(
        "OneCycle",
        {
            "cycle_min_lr": 1e-4,
            "cycle_max_lr": 1e-3,
            "cycle_first_step_size": up,
            "cycle_second_step_size": down,
            "cycle_max_mom": high,
            "decay_step_size": 10,
            "decay_mom_rate": 1e-4,
        },
    )
    for update, betas in enumerate(_betas(schedule, NUM_UPDATES)):
        after = update - (up + down)
        expected = high - (high - low) * _height(update, up, down)
        if update == 0:
            expected = low
        elif after > 0:
            expected = high * (1 + 1e-4 * after / 10)
        assert [first for first, _ in betas] == pytest.approx([expected] * 2, rel=1e-12)
        assert {second for _, second in betas} == {0.99}


def test_momentum_is_left_alone_where_it_is_told_so() -> None:
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 3, "cycle_momentum": False}
    assert _betas(_build("OneCycle", params), 10) == [[(0.9, 0.999)] * 2] * 10


def test_an_optimizer_without_betas_keeps_its_momentum_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    schedule = OneCycle(_optimizer(torch.optim.SGD), cycle_min_lr=1e-4, cycle_max_lr=1e-3, cycle_first_step_size=3)
    assert "SGD has no betas" in caplog.text
    assert _rates(schedule, 4)[3] == pytest.approx([1e-3, 1e-3])
    assert all("betas" not in group for group in schedule.optimizer.param_groups)


def test_momentum_may_differ_between_groups() -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_min_mom": [0.7, 0.8], "cycle_max_mom": [0.9, 0.95]}
    betas = _betas(_build("OneCycle", params), 2)
    assert betas[0] == [(0.7, 0.99), (0.8, 0.99)]
    assert [first for first, _ in betas[1]] == pytest.approx([0.9 - 0.2 / 2000, 0.95 - 0.15 / 2000])


# --- groups


def test_rates_may_differ_between_groups() -> None:
    schedule = _build("WarmupLR", {"warmup_min_lr": [1e-5, 1e-6], "warmup_max_lr": [1e-2, 1e-3], "warmup_num_steps": 4})
    rates = _rates(schedule, 7)
    assert (rates[0], rates[6]) == ([1e-5, 1e-6], [1e-2, 1e-3])
    assert _rates(_build("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 2e-4]}), 1)[0] == [1e-4, 2e-4]


@pytest.mark.parametrize(
    ("name", "params", "key"),
    [
        ("WarmupLR", {"warmup_min_lr": [1e-5]}, "warmup_min_lr"),
        ("WarmupLR", {"warmup_max_lr": [1e-5, 1e-4, 1e-3]}, "warmup_max_lr"),
        ("LRRangeTest", {"lr_range_test_min_lr": [1e-5]}, "lr_range_test_min_lr"),
        ("OneCycle", {"cycle_min_lr": [1e-5], "cycle_max_lr": 1e-3}, "cycle_min_lr"),
        ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": [1e-3]}, "cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 1e-5, "cycle_max_lr": 1e-3, "cycle_min_mom": [0.8]}, "cycle_min_mom"),
    ],
)
def test_another_number_of_rates_than_groups_is_refused(name: str, params: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match="one for each of 2 groups") as caught:
        _build(name, params)
    assert caught.value.key == f"scheduler.params.{key}"
    assert caught.value.value == params[key]


def test_rates_that_are_tensors_stay_the_same_tensors() -> None:
    lr = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=lr)
    schedule = LRRangeTest(optimizer, lr_range_test_min_lr=1e-2, lr_range_test_step_size=1)
    schedule.step()
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) == pytest.approx(2e-2)


# --- going on


@pytest.mark.parametrize(("name", "params"), [case[:2] for case in CASES], ids=NAMES)
@pytest.mark.parametrize("num_updates", [0, 1, 7, 95, 501])
def test_state_dict_goes_on_at_the_same_rates(name: str, params: dict[str, Any], num_updates: int) -> None:
    schedule, resumed = _build(name, params), _build(name, params)
    _rates(schedule, num_updates)
    resumed.load_state_dict(schedule.state_dict())
    assert resumed.get_last_lr() == schedule.get_last_lr()
    assert _betas(resumed, 3) == _betas(schedule, 3)
    assert _rates(resumed, 20) == _rates(schedule, 20)


def test_a_state_of_deepspeed_has_the_counter_alone() -> None:
    schedule, resumed = (_build("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 5}) for _ in range(2))
    _rates(schedule, 12)
    assert schedule.state_dict()["last_batch_iteration"] == 11
    resumed.load_state_dict({"last_batch_iteration": 11})
    assert _rates(resumed, 5) == _rates(schedule, 5)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_an_unknown_way_to_warm_up_is_the_logarithm_and_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    params = {"warmup_num_steps": 5} | ({"total_num_steps": 40} if name != "WarmupLR" else {})
    kind: Any = SCHEDULES[name]
    known, odd = (
        kind(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=1e-3), **params, warmup_type=word)
        for word in ("log", "cubic")
    )
    assert "warmup_type = 'cubic'" in caplog.text
    assert "'log'" not in caplog.text
    assert _rates(odd, 9) == _rates(known, 9)


def test_a_state_has_the_rates_that_it_began_with() -> None:
    resumed = _build("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 5})
    before = _rates(_build("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 5}), 9)
    resumed.load_state_dict({"last_batch_iteration": -1, "base_lrs": [2 * rate for rate in resumed.base_lrs]})
    assert torch.allclose(torch.tensor(_rates(resumed, 9)), 2 * torch.tensor(before))


@pytest.mark.parametrize(("name", "params"), [case[:2] for case in CASES], ids=NAMES)
def test_last_batch_iteration_begins_in_the_middle(name: str, params: dict[str, Any]) -> None:
    """The first update keeps the optimizer's rate, as in DeepSpeed, which expects a checkpoint to have set it."""
    whole = _rates(_build(name, params), 130)
    resumed = _rates(_build(name, {**params, "last_batch_iteration": 99}), 30)
    assert resumed[0] == list(BASE_LRS)
    assert resumed[1:] == whole[101:130]


def test_step_may_be_told_where_it_stands() -> None:
    schedule = WarmupLR(_optimizer(), warmup_num_steps=10, warmup_type="linear")
    schedule.step(5)
    assert schedule.get_last_lr() == pytest.approx([lr / 2 for lr in BASE_LRS])
    assert (schedule.last_batch_iteration, schedule.last_epoch) == (5, 6)


def test_a_warm_up_has_at_least_two_steps() -> None:
    assert warmup_progress(0, 1, "log") == 0.0
    assert warmup_progress(1, 1, "log") == 1.0
    assert warmup_progress(1, 1, "linear") == 0.5


@pytest.mark.parametrize("name", ["WarmupLR", "LRRangeTest", "OneCycle"])
def test_the_rate_that_it_tells_is_the_optimizers(name: str) -> None:
    optimizer = _optimizer()
    given: dict[str, Any] = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3} if name == "OneCycle" else {}
    schedule = SCHEDULES[name](optimizer, **given)
    for _ in range(3):
        optimizer.step()
        schedule.step()
        assert schedule.get_lr() == [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr()

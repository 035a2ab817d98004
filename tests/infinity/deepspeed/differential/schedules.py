"""Learning-rate schedules by name, as classes, and of the client's own."""

# mypy: ignore-errors
from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime import lr_schedules  # type: ignore[import-not-found]
from torch import nn

from tests.infinity.deepspeed.differential.case import case, cases_over, raised
from tests.infinity.deepspeed.differential.nets import batches, config, stack, start

SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup-log": ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_max_lr": 0.1, "warmup_num_steps": 5}),
    "warmup-linear": ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "warmup_type": "linear"}),
    "warmup-one-step": ("WarmupLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 1}),
    "warmup-decay": ("WarmupDecayLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 9}),
    "warmup-decay-linear": (
        "WarmupDecayLR",
        {"warmup_max_lr": 0.1, "warmup_num_steps": 3, "total_num_steps": 9, "warmup_type": "linear"},
    ),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}),
    "cosine-floor": ("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.2}),
    "range": ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3}),
    "range-stairs": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 3, "lr_range_test_step_rate": 2.0,
         "lr_range_test_staircase": True},
    ),
    "one-cycle": ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}),
    "one-cycle-decay": (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "cycle_second_step_size": 2,
         "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1},
    ),
    "one-cycle-stairs": (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_first_stair_count": 2,
         "cycle_second_stair_count": 2},
    ),
    "one-cycle-no-momentum": (
        "OneCycle",
        {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "cycle_momentum": False},
    ),
}  # fmt: skip


@cases_over(SCHEDULES, absolute=1e-8)
def by_name(_directory: Path, given: tuple[str, dict[str, Any]]) -> Any:
    name, params = given
    engine = start(stack(), config(0, scheduler={"type": name, "params": params}))
    seen: list[Any] = [engine.get_lr(), type(engine.lr_scheduler).__name__]
    for x, y in batches(11):
        engine.backward(engine(x, y))
        engine.step()
        seen.append(
            (engine.get_lr(), engine.lr_scheduler.get_lr(), engine.lr_scheduler.get_last_lr(), engine.get_mom())
        )
    return seen, engine.scheduler_name(), engine.scheduler_params()


@cases_over(SCHEDULES, absolute=1e-8)
def as_classes(_directory: Path, given: tuple[str, dict[str, Any]]) -> Any:
    name, params = given
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.02}, {"params": [model.bias], "lr": 0.04}])
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    seen = [schedule.state_dict()["last_batch_iteration"], [group["lr"] for group in optimizer.param_groups]]
    for _ in range(5):
        optimizer.step()
        schedule.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    again = getattr(lr_schedules, name)(optimizer, **params)
    again.load_state_dict(schedule.state_dict())
    again.step(2)
    iterations = [each.state_dict()["last_batch_iteration"] for each in (schedule, again)]
    return seen, iterations, again.get_last_lr()


@cases_over(SCHEDULES, absolute=1e-8)
def from_a_later_start(_directory: Path, given: tuple[str, dict[str, Any]]) -> Any:
    name, params = given
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.05, momentum=0.9)
    params = {**params, "cycle_momentum": False} if name == "OneCycle" else params
    schedule = getattr(lr_schedules, name)(optimizer, **params, last_batch_iteration=4)
    seen = []
    for _ in range(3):
        optimizer.step()
        schedule.step()
        seen.append([group["lr"] for group in optimizer.param_groups])
    return seen


@case()
def wrong_arguments(_directory: Path) -> Any:
    optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.05)
    return [
        raised(lambda: lr_schedules.WarmupLR(optimizer, warmup_min_lr=[0.1, 0.2])),
        raised(lambda: lr_schedules.OneCycle(nn.Linear(2, 2), 0.1, 0.2)),
        raised(lambda: lr_schedules.WarmupLR(nn.Linear(2, 2))),
        raised(lambda: lr_schedules.LRRangeTest(optimizer, lr_range_test_min_lr=[0.1, 0.2])),
    ]


@case()
def names(_directory: Path) -> Any:
    return {name: getattr(lr_schedules, name) for name in dir(lr_schedules) if name.isupper()}


@case()
def unknown_name(_directory: Path) -> Any:
    return raised(lambda: start(stack(), config(0, scheduler={"type": "Nothing", "params": {}}))) != "nothing"


@case()
def torchs_by_name(_directory: Path) -> Any:
    engine = start(stack(), config(0, scheduler={"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}}))
    seen = []
    for x, y in batches(5):
        engine.backward(engine(x, y))
        engine.step()
        seen.append(engine.get_lr())
    return seen


@cases_over({str(stage): stage for stage in range(4)})
def clients_object(_directory: Path, stage: int) -> Any:
    model = stack()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    given = config(stage, optimizer=None)
    engine = start(model, given, optimizer=optimizer, lr_scheduler=schedule, model_parameters=None)
    seen = [engine.lr_scheduler is schedule]
    for x, y in batches(3):
        engine.backward(engine(x, y))
        engine.step()
        seen.append(engine.get_lr())
    return seen


@cases_over({str(stage): stage for stage in range(4)})
def clients_function(_directory: Path, stage: int) -> Any:
    engine = start(
        stack(), config(stage), lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 / (1 + step)
        )
    )  # fmt: skip
    seen: list[Any] = [type(engine.lr_scheduler).__name__]
    for x, y in batches(3):
        engine.backward(engine(x, y))
        engine.step()
        seen.append(engine.get_lr())
    return seen


@case()
def lr_kwargs_of_step(_directory: Path) -> Any:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = start(stack(), config(1, scheduler=scheduler))
    seen = []
    for x, y in batches(2):
        engine.backward(engine(x, y))
        engine.step(lr_kwargs={"last_batch_iteration": 4})
        seen.append(engine.get_lr())
    return seen


@case()
def options_of_the_command_line(_directory: Path) -> Any:
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    return dict(sorted(vars(parser.parse_args([])).items()))


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "warmup": ("WarmupLR", {}),
    "warmup-linear": (
        "WarmupLR",
        {"warmup_min_lr": 1e-5, "warmup_max_lr": 2e-3, "warmup_num_steps": 312, "warmup_type": "linear"},
    ),
    "warmup-decay": ("WarmupDecayLR", {"total_num_steps": 800, "warmup_num_steps": 90}),
    "warmup-decay-never": ("WarmupDecayLR", {"total_num_steps": 60, "warmup_num_steps": 90, "warmup_min_lr": 1e-5}),
    "cosine": ("WarmupCosineLR", {"total_num_steps": 800, "warmup_num_steps": 90}),
    "cosine-short": (
        "WarmupCosineLR",
        {"total_num_steps": 60, "warmup_num_steps": 90, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.02},
    ),
    "one-cycle": (
        "OneCycle",
        {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 100, "cycle_second_step_size": 333,
         "decay_step_size": 7, "decay_lr_rate": 0.01, "decay_mom_rate": 0.001},
    ),
    "one-cycle-stairs": (
        "OneCycle",
        {"cycle_min_lr": 0.0, "cycle_max_lr": 1e-3, "cycle_first_step_size": 200, "cycle_second_step_size": 300,
         "cycle_first_stair_count": 7, "cycle_second_stair_count": 3},
    ),
    "range": ("LRRangeTest", {}),
    "range-stairs": (
        "LRRangeTest",
        {"lr_range_test_min_lr": 1e-4, "lr_range_test_step_size": 70, "lr_range_test_step_rate": 0.5,
         "lr_range_test_staircase": True},
    ),
}  # fmt: skip


@cases_over(LONG, relative=1e-8, absolute=1e-10)  # facts have 9 digits
def a_thousand_updates(_directory: Path, given: tuple[str, dict[str, Any]]) -> Any:
    """Every rate and momentum counts in the sums; some are told apart."""
    name, params = given
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.003}, {"params": [model.bias], "lr": 0.0007}])
    schedule = getattr(lr_schedules, name)(optimizer, **params)
    told, weighted = [], [0.0, 0.0, 0.0]
    for update in range(1000):
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        for place, value in enumerate([*rates, float(optimizer.param_groups[0]["betas"][0])]):
            weighted[place] += value * (1 + update % 97)
        if update % 83 == 0:
            told.append(rates)
        optimizer.step()
        schedule.step()
    return told, weighted

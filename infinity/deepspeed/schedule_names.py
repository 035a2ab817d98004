"""The names of schedules and of their parameters, and the command-line options that DeepSpeed's scripts add."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from infinity.update.schedules import SCHEDULES

LR_SCHEDULE: Final = "lr_schedule"
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR = "LRRangeTest", "OneCycle", "WarmupLR"
WARMUP_DECAY_LR, WARMUP_COSINE_LR = "WarmupDecayLR", "WarmupCosineLR"
VALID_LR_SCHEDULES: Final = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]
if set(VALID_LR_SCHEDULES) != set(SCHEDULES):
    raise ImportError("the schedules and their names differ")

LR_RANGE_TEST_MIN_LR: Final = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE: Final = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE: Final = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE: Final = "lr_range_test_staircase"
CYCLE_FIRST_STEP_SIZE: Final = "cycle_first_step_size"
CYCLE_SECOND_STEP_SIZE: Final = "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT: Final = "cycle_first_stair_count"
CYCLE_SECOND_STAIR_COUNT: Final = "cycle_second_stair_count"
DECAY_STEP_SIZE: Final = "decay_step_size"
CYCLE_MIN_LR: Final = "cycle_min_lr"
CYCLE_MAX_LR: Final = "cycle_max_lr"
DECAY_LR_RATE: Final = "decay_lr_rate"
CYCLE_MIN_MOM: Final = "cycle_min_mom"
CYCLE_MAX_MOM: Final = "cycle_max_mom"
DECAY_MOM_RATE: Final = "decay_mom_rate"
WARMUP_MIN_LR: Final = "warmup_min_lr"
WARMUP_MAX_LR: Final = "warmup_max_lr"
WARMUP_NUM_STEPS: Final = "warmup_num_steps"
WARMUP_TYPE: Final = "warmup_type"
WARMUP_LOG_RATE: Final = "log"
WARMUP_LINEAR_RATE: Final = "linear"
EDGE_VALUE: Final = "edge_value"
MID_VALUE: Final = "mid_value"
WARMUP_MIN_RATIO: Final = "warmup_min_ratio"
COS_MIN_RATIO: Final = "cos_min_ratio"
TOTAL_NUM_STEPS: Final = "total_num_steps"

_OPTIONS: Final = {
    LR_SCHEDULE: (str, None),
    LR_RANGE_TEST_MIN_LR: (float, 0.001),
    LR_RANGE_TEST_STEP_RATE: (float, 1.0),
    LR_RANGE_TEST_STEP_SIZE: (int, 1000),
    CYCLE_FIRST_STEP_SIZE: (int, 1000),
    CYCLE_FIRST_STAIR_COUNT: (int, -1),
    CYCLE_SECOND_STEP_SIZE: (int, -1),
    CYCLE_SECOND_STAIR_COUNT: (int, -1),
    DECAY_STEP_SIZE: (int, 1000),
    CYCLE_MIN_LR: (float, 0.01),
    CYCLE_MAX_LR: (float, 0.1),
    DECAY_LR_RATE: (float, 0.0),
    CYCLE_MIN_MOM: (float, 0.8),
    CYCLE_MAX_MOM: (float, 0.9),
    DECAY_MOM_RATE: (float, 0.0),
    WARMUP_MIN_LR: (float, 0.0),
    WARMUP_MAX_LR: (float, 0.001),
    WARMUP_NUM_STEPS: (int, 1000),
    WARMUP_TYPE: (str, WARMUP_LOG_RATE),
    WARMUP_MIN_RATIO: (float, 0.01),
    COS_MIN_RATIO: (float, 0.01),
}
_RANGE_TEST: Final = (LR_RANGE_TEST_MIN_LR, LR_RANGE_TEST_STEP_RATE, LR_RANGE_TEST_STEP_SIZE, LR_RANGE_TEST_STAIRCASE)
_ONE_CYCLE: Final = (
    *(CYCLE_FIRST_STEP_SIZE, CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT),
    *(DECAY_STEP_SIZE, CYCLE_MIN_LR, CYCLE_MAX_LR, DECAY_LR_RATE, CYCLE_MIN_MOM, CYCLE_MAX_MOM, DECAY_MOM_RATE),
)
_WARMUP: Final = (WARMUP_MIN_LR, WARMUP_MAX_LR, WARMUP_NUM_STEPS, WARMUP_TYPE)
_WARMUP_COSINE: Final = (WARMUP_NUM_STEPS, WARMUP_TYPE, WARMUP_MIN_RATIO, COS_MIN_RATIO)
_SPOKEN_OF: Final = {
    LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR,
    ONE_CYCLE: CYCLE_MAX_LR,
    WARMUP_LR: WARMUP_MAX_LR,
    WARMUP_DECAY_LR: WARMUP_MAX_LR,
}
"""The rate of each schedule that scripts ask for."""


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one option for each parameter of the schedules; what a script does with them is its own."""
    group = parser.add_argument_group("Convergence Tuning", "parameters of learning-rate schedules")
    for name, (kind, default) in _OPTIONS.items():
        group.add_argument(f"--{name}", type=kind, default=default)
    group.add_argument(f"--{LR_RANGE_TEST_STAIRCASE}", action="store_true")
    group.add_argument("--cycle_momentum", action="store_true")
    return parser


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """The section ``scheduler`` that the options say, or None with the reason."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not supported LR schedule"
    params: dict[str, Any] = {}
    _OVERRIDES[name](args, params)
    return {"type": name, "params": params}, None


def get_lr_from_config(config: Mapping[str, Any]) -> tuple[float | None, str]:
    """The rate that a section ``scheduler`` speaks of, or None with the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    name = config["type"]
    if name == WARMUP_COSINE_LR:
        return None, f"{name} scales the optimizer learning rate by a ratio, so its params define no lr"
    if name not in _SPOKEN_OF:
        return None, f"{name} is not a valid LR schedule"
    return config["params"][_SPOKEN_OF[name]], ""


def _override(args: argparse.Namespace, params: dict[str, Any], names: Sequence[str]) -> None:
    params.update({name: getattr(args, name) for name in names if getattr(args, name, None) is not None})


def override_lr_range_test_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    """Write what the options say of the range test over ``params``; so do the others of theirs."""
    _override(args, params, _RANGE_TEST)


def override_1cycle_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    _override(args, params, _ONE_CYCLE)


def override_warmupLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802 (DeepSpeed's)
    _override(args, params, _WARMUP)


def override_warmupCosineLR_params(args: argparse.Namespace, params: dict[str, Any]) -> None:  # noqa: N802 (as above)
    _override(args, params, _WARMUP_COSINE)


def override_params(args: argparse.Namespace, params: dict[str, Any]) -> None:
    for override in dict.fromkeys(_OVERRIDES.values()):
        override(args, params)


_OVERRIDES: Final[Mapping[str, Callable[[argparse.Namespace, dict[str, Any]], None]]] = {
    LR_RANGE_TEST: override_lr_range_test_params,
    ONE_CYCLE: override_1cycle_params,
    WARMUP_LR: override_warmupLR_params,
    WARMUP_DECAY_LR: override_warmupLR_params,
    WARMUP_COSINE_LR: override_warmupCosineLR_params,
}

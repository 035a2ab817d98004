"""The names of schedules and of their parameters, and the command-line options that DeepSpeed's scripts add."""

from __future__ import annotations

import argparse
from typing import Final

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


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one option for each parameter of the schedules; what a script does with them is its own."""
    group = parser.add_argument_group("Convergence Tuning", "parameters of learning-rate schedules")
    for name, (kind, default) in _OPTIONS.items():
        group.add_argument(f"--{name}", type=kind, default=default)
    group.add_argument(f"--{LR_RANGE_TEST_STAIRCASE}", action="store_true")
    group.add_argument("--cycle_momentum", action="store_true")
    return parser

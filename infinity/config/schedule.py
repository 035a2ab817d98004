"""The ``scheduler`` section: one class for each schedule, with DeepSpeed's defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from infinity.config.section import Beta, Count, Fraction, NonNegative, Positive, Section, as_tuple, whole

WarmupType = Literal["log", "linear"]
Rates = Annotated[NonNegative | tuple[NonNegative, ...], BeforeValidator(as_tuple)]
"""One rate for all param groups of the optimizer, or one for each."""
Momenta = Annotated[Beta | tuple[Beta, ...], BeforeValidator(as_tuple)]


class ScheduleParams(Section):
    last_batch_iteration: Annotated[int, Field(ge=-1), BeforeValidator(whole)] = -1
    """Updates before the schedule's first step, less one: -1 begins it."""


class WarmupLRParams(ScheduleParams):
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    """None = each param group's own rate."""
    warmup_num_steps: Positive = 1000
    warmup_type: WarmupType = "log"


class WarmupDecayLRParams(ScheduleParams):
    total_num_steps: Positive
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 1e-3
    warmup_num_steps: Positive = 1000
    warmup_type: WarmupType = "log"


class WarmupCosineLRParams(ScheduleParams):
    """Ratios of each param group's own learning rate."""

    total_num_steps: Positive
    warmup_min_ratio: Fraction = 0.0
    warmup_num_steps: Positive = 1000
    cos_min_ratio: Fraction = 1e-4
    warmup_type: WarmupType = "log"


class OneCycleParams(ScheduleParams):
    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Count | None = None
    """None = as many as the first half has."""
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    """None = as many as the first half has."""
    decay_step_size: Count = 0
    """0 = no decay after the cycle."""
    cycle_momentum: bool = True
    cycle_min_mom: Momenta = 0.8
    cycle_max_mom: Momenta = 0.9
    decay_mom_rate: NonNegative = 0.0


class LRRangeTestParams(ScheduleParams):
    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: bool = False


class WarmupLRSchedule(Section):
    type: Literal["WarmupLR"]
    params: WarmupLRParams = WarmupLRParams()


class WarmupDecayLRSchedule(Section):
    type: Literal["WarmupDecayLR"]
    params: WarmupDecayLRParams


class WarmupCosineLRSchedule(Section):
    type: Literal["WarmupCosineLR"]
    params: WarmupCosineLRParams


class OneCycleSchedule(Section):
    type: Literal["OneCycle"]
    params: OneCycleParams


class LRRangeTestSchedule(Section):
    type: Literal["LRRangeTest"]
    params: LRRangeTestParams = LRRangeTestParams()


Scheduler = Annotated[
    WarmupLRSchedule | WarmupDecayLRSchedule | WarmupCosineLRSchedule | OneCycleSchedule | LRRangeTestSchedule,
    Field(discriminator="type"),
]

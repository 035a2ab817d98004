"""DeepSpeed's learning-rate schedules as torch ``LRScheduler``s: the same rates, update by update.

A schedule counts iterations from -1 and is stepped after the optimizer, so update n (from 0) runs at iteration n - 1:
for the warm-ups the first two updates run at the starting rate. The state that a checkpoint holds is that counter.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infinity.config.schedule import Scheduler, WarmupType
from infinity.errors import ConfigError

SECOND_BETA = 0.99
"""What ``OneCycle`` sets the second beta to, as in DeepSpeed, whatever the optimizer was made with."""

_log = logging.getLogger(__name__)


def build_schedule(config: Scheduler, optimizer: Optimizer) -> LRScheduler:
    """The schedule that the ``scheduler`` section names."""
    return SCHEDULES[config.type](optimizer, **config.params.model_dump())


class Schedule(LRScheduler):
    """A schedule whose rates are a function of the iteration alone.

    ``last_batch_iteration`` above -1 resumes: the optimizer keeps the rates that it has until the first ``step``."""

    def __init__(self, optimizer: Optimizer, *, last_batch_iteration: int = -1) -> None:
        _check_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        super().__init__(optimizer)

    @abstractmethod
    def rates(self, iteration: int) -> list[float]:
        """The learning rate of each param group at ``iteration``, which is -1 before the first step."""

    def get_lr(self) -> list[float | Tensor]:
        return list(self.rates(self.last_batch_iteration))

    def step(
        self, epoch: int | None = None, *, last_batch_iteration: int | None = None, batch_iteration: int | None = None
    ) -> None:
        """Go on to the next iteration, or to ``epoch``, and set the optimizer's rates. The other two are what DeepSpeed
        calls ``epoch``."""
        asked = next((each for each in (epoch, last_batch_iteration, batch_iteration) if each is not None), None)
        self.last_batch_iteration = self.last_batch_iteration + 1 if asked is None else asked
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the saved schedule stood: the next update runs at its rate. DeepSpeed's states have the counter
        alone."""
        self.last_batch_iteration = int(state_dict["last_batch_iteration"])
        self.base_lrs = list(state_dict.get("base_lrs", self.base_lrs))
        self._apply()

    def _initial_step(self) -> None:
        """What the base class calls once, at its end."""
        if self.last_batch_iteration == -1:
            self._apply()
        else:
            self._note()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates(self.last_batch_iteration), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._note()

    def _note(self) -> None:
        """Keep what torch's own schedulers show."""
        self.last_epoch = self.last_batch_iteration + 1
        self._step_count = self.last_epoch + 1
        self._last_lr = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _own_rates(self) -> list[float]:
        """The rates that the param groups were made with."""
        return [float(rate) for rate in self.base_lrs]

    def _for_each_group(self, value: float | Sequence[float], name: str) -> list[float]:
        num_groups = len(self.optimizer.param_groups)
        if isinstance(value, int | float):
            return [float(value)] * num_groups
        if len(value) != num_groups:
            raise ConfigError(
                f"scheduler.params.{name}", list(value), f"must be one rate, or one for each of {num_groups} groups"
            )
        return [float(rate) for rate in value]


def _check_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a schedule needs an optimizer, not a {type(optimizer).__name__}")


def _positive(name: str, steps: int) -> int:
    """A number of updates. Raises ConfigError unless it is one."""
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"scheduler.params.{name}", steps, "must be a number of updates, 1 or more")
    return steps


def _known(warmup_type: str) -> WarmupType:
    """The word, if it is one; "log" for any other, as DeepSpeed takes it, which is told."""
    if warmup_type not in ("log", "linear"):
        _log.warning("warmup_type = %r is neither log nor linear: the rate rises by the logarithm", warmup_type)
    return "linear" if warmup_type == "linear" else "log"


def warmup_progress(iteration: int, warmup_num_steps: int, warmup_type: WarmupType) -> float:
    """Share of the warm-up done at ``iteration`` >= 0: 0 at the start, 1 from ``warmup_num_steps`` on.

    "log": log(iteration + 1) / log(warmup_num_steps); "linear": iteration / warmup_num_steps. A warm-up has at least
    two steps, as in DeepSpeed."""
    num_steps = max(2, warmup_num_steps)
    if iteration >= num_steps:
        return 1.0
    if warmup_type == "log":
        return math.log(iteration + 1) * (1.0 / math.log(num_steps))  # in DeepSpeed's order: the bits are its
    return iteration / num_steps


class WarmupLR(Schedule):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` over ``warmup_num_steps`` updates, then constant.

    ``warmup_max_lr`` None: each param group rises to its own ``lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.warmup_min_lr, self.warmup_max_lr = warmup_min_lr, warmup_max_lr
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", warmup_num_steps))
        self.warmup_type = _known(warmup_type)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    @property
    def min_lrs(self) -> list[float]:
        """Where each param group begins."""
        return self._for_each_group(self.warmup_min_lr, "warmup_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        """What each param group rises to."""
        highest = self._own_rates() if self.warmup_max_lr is None else self.warmup_max_lr
        return self._for_each_group(highest, "warmup_max_lr")

    def rates(self, iteration: int) -> list[float]:
        progress = self.progress(iteration) if iteration >= 0 else 0.0
        return [low + (high - low) * progress for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def progress(self, iteration: int) -> float:
        """The share of the way from the lower to the upper rate, for iterations from 0 on."""
        return warmup_progress(iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then linear decay that reaches ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
            last_batch_iteration=last_batch_iteration,
        )

    def progress(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super().progress(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(Schedule):
    """Ratios of each param group's own rate: ``warmup_min_ratio`` to 1, then a half cosine to ``cos_min_ratio``.

    The first update runs at rate 0, as in DeepSpeed."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: WarmupType = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, _positive("warmup_num_steps", warmup_num_steps))
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type = _known(warmup_type)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        ratio = self.ratio(iteration) if iteration >= 0 else 0.0
        return [base_lr * ratio for base_lr in self._own_rates()]

    def get_lr_ratio(self) -> float:
        """The share of the own rate that is run at now; 0 before the first step."""
        return self.ratio(self.last_batch_iteration) if self.last_batch_iteration >= 0 else 0.0

    def ratio(self, iteration: int) -> float:
        """The share of the own rate, for iterations from 0 on."""
        if iteration < self.warmup_num_steps:
            progress = warmup_progress(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * progress
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = (1.0 + math.cos(math.pi * min(1.0, done))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class LRRangeTest(Schedule):
    """Smith's range test: from ``lr_range_test_min_lr`` up by ``lr_range_test_step_rate`` of it each
    ``lr_range_test_step_size`` updates, in stairs or continuously, without end."""

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lr = lr_range_test_min_lr
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)

    def rates(self, iteration: int) -> list[float]:
        done = iteration + 1
        intervals = done // self.step_size if self.staircase else done / self.step_size
        lows = self._for_each_group(self.min_lr, "lr_range_test_min_lr")
        return [low * (1 + self.step_rate * intervals) for low in lows]


class OneCycle(Schedule):
    """Smith's cycle: up from ``cycle_min_lr`` to ``cycle_max_lr`` and down again, then decay; momentum the other way.

    Momentum is the first beta; the second becomes 0.99. Before the first step momentum is ``cycle_min_mom``, as in
    DeepSpeed. An optimizer without betas keeps its momentum, with a warning."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        _check_optimizer(optimizer)
        first, stairs = cycle_first_step_size, cycle_first_stair_count
        second = first if cycle_second_step_size is None else cycle_second_step_size
        for name, steps, least in (("cycle_first_step_size", first, 1), ("cycle_second_step_size", second, 0)):
            if steps < least:
                raise ConfigError(f"scheduler.params.{name}", steps, f"must be a number of updates, {least} or more")
        self.cycle_min_lr, self.cycle_max_lr = cycle_min_lr, cycle_max_lr
        self.cycle_min_mom, self.cycle_max_mom = cycle_min_mom, cycle_max_mom
        self.halves = (first, second)
        self.stairs = (stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            _log.warning("cycle_momentum is off: %s has no betas", type(optimizer).__name__)
        super().__init__(optimizer, last_batch_iteration=last_batch_iteration)
        if self.cycle_momentum:
            self._for_each_group(self.cycle_max_mom, "cycle_max_mom")  # whose number counts from the first step on

    @property
    def num_steps(self) -> int:
        """Iterations of the whole cycle."""
        return sum(self.halves)

    total_size = num_steps

    @property
    def step_ratio(self) -> float:
        """The share of the cycle in which the rate rises."""
        return self.halves[0] / self.num_steps

    @property
    def min_lrs(self) -> list[float]:
        """Where each param group's cycle begins and ends."""
        return self._for_each_group(self.cycle_min_lr, "cycle_min_lr")

    @property
    def max_lrs(self) -> list[float]:
        """The height of each param group's cycle."""
        return self._for_each_group(self.cycle_max_lr, "cycle_max_lr")

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group at this iteration; None where momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        return [(momentum, SECOND_BETA) for momentum in self.momenta(self.last_batch_iteration)]

    def rates(self, iteration: int) -> list[float]:
        if iteration < self.num_steps:
            height = self.height(iteration)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        decay = 1 + self.decay_lr_rate * self.decays(iteration)
        return [low / decay for low in self.min_lrs]

    def momenta(self, iteration: int) -> list[float]:
        """The first beta of each param group at ``iteration``."""
        lows = self._for_each_group(self.cycle_min_mom, "cycle_min_mom")
        highs = self._for_each_group(self.cycle_max_mom, "cycle_max_mom")
        if iteration < self.num_steps:
            height = self.height(iteration)
            return [high - (high - low) * height for low, high in zip(lows, highs, strict=True)]
        growth = 1 + self.decay_mom_rate * self.decays(iteration)
        return [high * growth for high in highs]

    def height(self, iteration: int) -> float:
        """How far the cycle is up, from 0 to 1; with stairs, the stair that it has reached.

        Stairs are cut in whole iterations; the slope goes through shares of the cycle, for DeepSpeed's rounding."""
        position = (iteration + 1) % self.num_steps
        rising = position <= self.halves[0]
        stairs = self.stairs[0] if rising else self.stairs[1]
        if stairs:
            along, half = (position, self.halves[0]) if rising else (self.num_steps - position, self.halves[1])
            return along * stairs // half / stairs
        turns = (iteration + 1) / self.num_steps
        share = 1.0 + turns - math.floor(1 + turns)
        peak = self.step_ratio
        return share / peak if share <= peak else (share - 1) / (peak - 1)

    def decays(self, iteration: int) -> float:
        """Decays since the end of the cycle, parts of one included."""
        return (iteration - self.num_steps + 1) / self.decay_step_size if self.decay_step_size else 0.0

    def _apply(self) -> None:
        super()._apply()
        if self.cycle_momentum:
            iteration = self.last_batch_iteration
            lows = self._for_each_group(self.cycle_min_mom, "cycle_min_mom")
            momenta = lows if iteration < 0 else self.momenta(iteration)
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, SECOND_BETA)


SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""Every schedule by the name that ``scheduler.type`` has."""

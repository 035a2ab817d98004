"""DeepSpeed's warm-up schedules as torch ``LRScheduler``s.

Rates equal DeepSpeed's update by update. DeepSpeed counts iterations from -1 and steps its schedule after the
optimizer, so update n (from 0) runs at iteration n - 1: the first two updates run at the starting rate.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Scheduler
from infinity.config.sections import WarmupCosineLRSchedule, WarmupDecayLRSchedule

WarmupType = Literal["log", "linear"]


def build_schedule(config: Scheduler, optimizer: Optimizer) -> LRScheduler:
    """The schedule that the ``scheduler`` section names."""
    if isinstance(config, WarmupCosineLRSchedule):
        return WarmupCosineLR(optimizer, **config.params.model_dump())
    if isinstance(config, WarmupDecayLRSchedule):
        return WarmupDecayLR(optimizer, **config.params.model_dump())
    return WarmupLR(optimizer, **config.params.model_dump())


def warmup_progress(iteration: int, warmup_num_steps: int, warmup_type: WarmupType) -> float:
    """Share of the warm-up done at ``iteration`` >= 0: 0 at the start, 1 from ``warmup_num_steps`` on.

    "log": log(iteration + 1) / log(warmup_num_steps); "linear": iteration / warmup_num_steps. A warm-up has at least
    two steps, as in DeepSpeed."""
    num_steps = max(2, warmup_num_steps)
    if iteration >= num_steps:
        return 1.0
    if warmup_type == "log":
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps


class WarmupLR(LRScheduler):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` over ``warmup_num_steps`` updates, then constant.

    ``warmup_max_lr`` None: each param group rises to its own ``lr``."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
    ) -> None:
        self.warmup_min_lr = warmup_min_lr
        self.warmup_max_lr = warmup_max_lr
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type: WarmupType = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        progress = self._progress(self.last_epoch - 1) if self.last_epoch > 0 else 0.0
        highs = self.base_lrs if self.warmup_max_lr is None else [self.warmup_max_lr] * len(self.base_lrs)
        return [self.warmup_min_lr + (high - self.warmup_min_lr) * progress for high in highs]

    def _progress(self, iteration: int) -> float:
        return warmup_progress(iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then linear decay that reaches ``warmup_min_lr`` at ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_lr: float = 0.0,
        warmup_max_lr: float = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: WarmupType = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr=warmup_min_lr,
            warmup_max_lr=warmup_max_lr,
            warmup_num_steps=warmup_num_steps,
            warmup_type=warmup_type,
        )

    def _progress(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._progress(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(LRScheduler):
    """Ratios of each param group's own rate: ``warmup_min_ratio`` to 1, then a half cosine to ``cos_min_ratio``.

    The first update runs at rate 0, as in DeepSpeed."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: WarmupType = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.cos_min_ratio = cos_min_ratio
        self.warmup_type: WarmupType = warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        ratio = self._ratio(self.last_epoch - 1) if self.last_epoch > 0 else 0.0
        return [base_lr * ratio for base_lr in self.base_lrs]

    def _ratio(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            progress = warmup_progress(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * progress
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        cosine = (1.0 + math.cos(math.pi * min(1.0, done))) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)

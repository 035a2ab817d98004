"""What an engine says of itself: its configuration, its place among the ranks, its counters and figures."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from infinity.config import Config
from infinity.engine.loop import TrainingLoop
from infinity.engine.runtime import Runtime
from infinity.loader import PlacedLoader
from infinity.report import IoReport
from infinity.update.optimizer import ShardedOptimizer


class Answers(nn.Module):
    """What the dialect's scripts ask of an engine. Asking changes no result."""

    _loop: TrainingLoop
    _runtime: Runtime
    optimizer: ShardedOptimizer | None

    @property
    def config(self) -> Config:
        """The configuration as it is now; ``set_train_batch_size`` changes it."""
        return self._loop.config

    @property
    def global_steps(self) -> int:
        """Optimizer steps done, those that were skipped included."""
        return self._loop.global_steps

    @property
    def global_samples(self) -> int:
        """Samples trained on so far, by all ranks."""
        return self._loop.global_samples

    @property
    def global_rank(self) -> int:
        """This rank among those that share the model."""
        return self._runtime.collectives.rank

    @property
    def world_size(self) -> int:
        """Ranks that share the model."""
        return self._runtime.collectives.world_size

    @property
    def skipped_steps(self) -> int:
        """Those steps that changed nothing, because a gradient was not finite."""
        return self._loop.skipped_steps

    @property
    def cur_scale(self) -> float:
        """What the next backward multiplies its loss by; 1 without fp16."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    def loss_scale(self) -> float:
        """The fixed loss scale of the configuration; 0 where it is dynamic."""
        return self._loop.config.fp16.loss_scale

    def dynamic_loss_scale(self) -> bool:
        return self._loop.config.scales_as_torch or (
            self._loop.config.fp16.enabled and self._loop.config.fp16.loss_scale == 0
        )

    @property
    def micro_steps(self) -> int:
        """Calls of ``step`` since the last update."""
        return self._loop.micro_steps

    @property
    def training_dataloader(self) -> PlacedLoader | None:
        """The loader that ``initialize`` made of its ``training_data``; checkpoints hold its place."""
        return self._loop.training_loader

    @property
    def lr_scheduler(self) -> LRScheduler | None:
        """The schedule that is stepped after every update."""
        return self._loop.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: LRScheduler | None) -> None:
        self._loop.lr_scheduler = scheduler

    @property
    def device(self) -> torch.device:
        return self._runtime.device

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._loop.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self._loop.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        return self._loop.config.train_batch_size

    def gradient_clipping(self) -> float:
        return self._loop.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self._loop.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        return self._loop.config.zero_optimization.stage > 0

    def bfloat16_enabled(self) -> bool:
        return self._loop.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        return self._loop.config.fp16.enabled

    def steps_per_print(self) -> int:
        return self._loop.config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._loop.config.wall_clock_breakdown

    def comms_summary(self) -> str:
        """A table of this rank's collectives; empty but for its head without ``comms_logger``."""
        return self._runtime.collectives.log.summary()

    def get_lr(self) -> list[float]:
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step, before clipping and without the loss scale; not finite where the step was skipped.
        Without ``gradient_clipping`` the first call asks for it: it is known from the next step on."""
        return self._loop.grad_norm()

    def io_report(self) -> IoReport:
        """The last step of this rank: traffic per tier and kind, hits, stalls, times, memory."""
        return self._loop.io_report()

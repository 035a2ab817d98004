"""``ThroughputTimer``: samples per second, of steps that the caller marks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from infinity.deepspeed.logs import logger


class TimerConfig(Protocol):
    """What the timer reads of its section: whether it runs, and whether it waits for the device."""

    enabled: bool
    synchronized: bool


class ThroughputTimer:
    """Adds up the time between ``start`` and ``stop``, from step ``start_step`` on.

    Args:
        config: ``enabled`` and ``synchronized``.
        batch_size: samples of a step, over all its micro-batches.
        start_step: the steps before are taken for a warm-up.
        steps_per_output: a line is logged each so many steps; by default none.
        monitor_memory: log also what the device's memory holds.
        logging_fn: who gets the line; by default the logger.
    """

    def __init__(
        self,
        config: TimerConfig,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        self.config, self.batch_size = config, 1 if batch_size is None else batch_size
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.monitor_memory, self.logging = monitor_memory, logging_fn or logger.info
        self.start_time = self.end_time = self.total_elapsed_time = self.step_elapsed_time = 0.0
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.started = self.initialized = False

    def update_epoch_count(self) -> None:
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A micro-batch begins."""
        if self.config.enabled:
            self.initialized = self.started = True
            if self.global_step_count >= self.start_step:
                self.start_time = self._now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """It ends, and with ``global_step`` the step, too."""
        if not self.config.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not self.start_time:
            return
        self.end_time = self._now()
        self.total_elapsed_time += self.end_time - self.start_time
        self.step_elapsed_time += self.end_time - self.start_time
        if global_step:
            if report_speed and self._is_report_boundary():
                self._report()
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Samples a second, over the steps that were timed; -inf before the first of them."""
        timed = self.global_step_count - self.start_step
        return self.batch_size * timed / self.total_elapsed_time if timed > 0 else float("-inf")

    def _is_report_boundary(self) -> bool:
        return self.steps_per_output is not None and self.global_step_count % self.steps_per_output == 0

    def _now(self) -> float:
        if self.config.synchronized and torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.time()

    def _report(self) -> None:
        here = f"epoch={self.epoch_count}/micro_step={self.micro_step_count}/global_step={self.global_step_count}"
        now = self.batch_size / max(self.step_elapsed_time, 1e-6)
        self.logging(f"{here}, RunningAvgSamplesPerSec={self.avg_samples_per_sec()}, CurrSamplesPerSec={now}")
        if self.monitor_memory and torch.accelerator.is_available():
            self.logging(f"{here}, MemAllocated={torch.accelerator.memory_allocated() / 2**30:.2f}GB")

"""Lines in the log about where a step's time went, and what memory holds."""

from __future__ import annotations

import logging
import time
from typing import Final

import torch

from infinity.config import Config
from infinity.config.observing import ThroughputTimer
from infinity.observe.observer import Periodic, StepFacts
from io_daemon.disk.kernel_text import read_text
from io_daemon.disk.mounts import PROC
from io_daemon.machine.meminfo import available_bytes
from io_daemon.shared.protocol import PAGE_BYTES

GIB = 1 << 30
RATES_MAX: Final = 16
"""Learning rates that a line has: there may be one a parameter."""
_log = logging.getLogger(__name__)


class Progress(Periodic):
    """``steps_per_print``: that the job goes on, at which rates, and how fast.

    Samples a second are of the steps since the last line, with all that happened between them; the first step, which
    plans, is not counted."""

    def __init__(self, every: int, timer: ThroughputTimer, device: torch.device) -> None:
        super().__init__(every)
        self._times = timer.enabled and every > 0
        self._waits_for = device if timer.synchronized and device.type != "cpu" else None
        self._period: tuple[float, int] | None = None
        """When it began, and the samples before it."""
        self._last_step: int | None = None

    def after_step(self, facts: StepFacts) -> None:
        if facts.step - 1 != self._last_step:  # the first, or another engine's past has been loaded
            self._period = None
        self._last_step = facts.step
        super().after_step(facts)
        if self._times and self._period is None:
            self._period = self._clock(), facts.samples

    def note(self, facts: StepFacts) -> None:
        rates = str(list(facts.learning_rates[:RATES_MAX]))
        if (num_others := len(facts.learning_rates) - RATES_MAX) > 0:
            rates += f" and {num_others} more"
        # what the host took to queue a step is no time of the device's
        seconds = f", {facts.step_s:.3f} s" if self._waits_for is None else ""
        _log.info("step %d, lr %s%s%s", facts.step, rates, seconds, self._throughput(facts.samples))

    def _throughput(self, samples: int) -> str:
        if self._period is None:
            return ""
        then, before = self._period
        self._period = now, _ = self._clock(), samples
        return f", {(samples - before) / (now - then):.1f} samples/s"

    def _clock(self) -> float:
        if self._waits_for is not None:
            torch.accelerator.synchronize(self._waits_for)
        return time.perf_counter()


class WallClock(Periodic):
    """``wall_clock_breakdown``: times of forward, backward and update."""

    wants_times = True

    def note(self, facts: StepFacts) -> None:
        _log.info(
            "step %d time (ms) | fwd: %.2f | bwd: %.2f | step: %.2f | all: %.2f",
            facts.step,
            1e3 * facts.forward_s,
            1e3 * facts.backward_s,
            1e3 * facts.update_s,
            1e3 * facts.step_s,
        )


class Memory(Periodic):
    """``memory_breakdown``: this process's memory, and the device's."""

    def __init__(self, every: int, device: torch.device) -> None:
        super().__init__(every)
        self._device = device

    def note(self, facts: StepFacts) -> None:
        _log.info("step %d memory | %s", facts.step, memory_line(self._device))


def tell_configuration(config: Config) -> None:
    """``dump_state``: the configuration with its defaults."""
    _log.info("the configuration: %s", config.model_dump_json(indent=2))


def memory_line(device: torch.device) -> str:
    """What this process holds now, in words."""
    resident_pages = int((read_text(PROC / "self" / "statm") or "0 0").split()[1])
    line = f"process: {resident_pages * PAGE_BYTES / GIB:.2f} GiB | free on the node: {available_bytes() / GIB:.2f} GiB"
    if device.type != "cpu":
        used, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
        line += f" | {device}: {used / GIB:.2f} GiB, at most {peak / GIB:.2f} GiB"
    return line

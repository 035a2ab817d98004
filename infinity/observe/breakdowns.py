"""Lines in the log about where a step's time went, and what memory holds."""

from __future__ import annotations

import logging

import torch

from infinity.observe.observer import Periodic, StepFacts
from io_daemon.disk.kernel_text import read_text
from io_daemon.disk.mounts import PROC
from io_daemon.machine.meminfo import available_bytes
from io_daemon.shared.protocol import PAGE_BYTES

GIB = 1 << 30
_log = logging.getLogger(__name__)


class Progress(Periodic):
    """``steps_per_print``: that the job goes on, at which rates, and how fast."""

    def note(self, facts: StepFacts) -> None:
        _log.info("step %d, lr %s, %.3f s", facts.step, list(facts.learning_rates), facts.step_s)


class WallClock(Periodic):
    """``wall_clock_breakdown``: times of forward, backward and update."""

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


def memory_line(device: torch.device) -> str:
    """What this process holds now, in words."""
    resident_pages = int((read_text(PROC / "self" / "statm") or "0 0").split()[1])
    line = f"process: {resident_pages * PAGE_BYTES / GIB:.2f} GiB | free on the node: {available_bytes() / GIB:.2f} GiB"
    if device.type != "cpu":
        used, peak = torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)
        line += f" | {device}: {used / GIB:.2f} GiB, at most {peak / GIB:.2f} GiB"
    return line

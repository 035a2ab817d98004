"""Timers by name, which scripts start and stop around what they do: ``SynchronizedWallClockTimer``, and one of none."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from numpy import mean

from infinity.deepspeed.accelerators import get_accelerator
from infinity.deepspeed.asserted import asserted
from infinity.deepspeed.logs import print_dist
from infinity.errors import EngineStateError

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"


class WallTimer:
    """Adds up the milliseconds between ``start`` and ``stop``; the device is waited for at both."""

    def __init__(self, name: str) -> None:
        self.name_, self.started_ = name, False
        self.elapsed_records: list[float] = []
        """Milliseconds of each ``start`` to its ``stop``."""
        self._since = 0.0

    @asserted
    def start(self) -> None:
        """Raises EngineStateError if it runs."""
        if self.started_:
            raise EngineStateError(f"{self.name_} timer has already been started: stop() comes first")
        self.started_, self._since = True, _now()

    @asserted
    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Raises EngineStateError if it does not run."""
        if not self.started_:
            raise EngineStateError(f"{self.name_} timer is not started: start() comes first")
        self.started_ = False
        self.elapsed_records.append((_now() - self._since) * 1000.0)

    def reset(self) -> None:
        """Begin anew; it runs no longer."""
        self.started_ = False
        self.elapsed_records = []

    def elapsed(self, reset: bool = True) -> float:
        """The milliseconds so far, which with ``reset`` begin anew. One that runs goes on."""
        if runs := self.started_:
            self.stop()
        milliseconds = sum(self.elapsed_records)
        if reset:
            self.reset()
        if runs:
            self.start()
        return milliseconds

    def mean(self) -> float:
        """The mean of the times in milliseconds, without the tenth that is shortest and the tenth that is longest."""
        self.elapsed(reset=False)
        records, cut = sorted(self.elapsed_records), round(0.1 * len(self.elapsed_records))
        return float(mean(records[cut : len(records) - cut])) if records else 0.0


class SynchronizedWallClockTimer:
    """Timers by name, each made when it is first asked for."""

    Timer = WallTimer

    def __init__(self) -> None:
        self.timers: dict[str, WallTimer] = {}

    def __call__(self, name: str) -> WallTimer:
        """The timer of that name."""
        return self.timers.setdefault(name, WallTimer(name))

    def get_timers(self) -> dict[str, WallTimer]:
        """All of them."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """What the device's memory holds, in words."""
        device = get_accelerator()
        figures = {
            "mem_allocated": device.memory_allocated(),
            "max_mem_allocated": device.max_memory_allocated(),
            "cache_allocated": device.memory_cached(),
            "max_cache_allocated": device.max_memory_cached(),
        }
        return "".join(f" | {name}: {size / 2**30:.4f} GB" for name, size in figures.items())

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print the milliseconds of each name that there is, divided by ``normalizer``, by default on rank 0."""
        told = [
            f" | {name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        print_dist(f"time (ms){''.join(told)}", ranks=ranks or [0])

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """A thousand times each timer's mean, as DeepSpeed has it, divided by ``normalizer``."""
        return {name: self.timers[name].mean() * 1000.0 / normalizer for name in names if name in self.timers}


class NoopTimer:
    """Takes the same calls, and times nothing."""

    class Timer:
        """One timer for all names."""

        def start(self) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def stop(self, **kwargs: Any) -> None:
            """Nothing."""

        def elapsed(self, **kwargs: Any) -> float:
            """0."""
            return 0

        def mean(self) -> float:
            """0."""
            return 0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """The one timer."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None."""
        return {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def get_mean(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.time()

"""Figures of a script's own, written where the configuration's monitors write."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

from infinity.observe.monitors import Monitor, monitors_in


class MonitorMaster:
    """What ``monitor_config`` asks for, on rank 0; elsewhere it writes nothing.

    Args:
        monitor_config: ``DeepSpeedConfig(...).monitor_config``, or what has its sections.
        monitors: an engine's, which are written to then; by default they are made.
    """

    def __init__(self, monitor_config: Any, monitors: Sequence[Monitor] | None = None) -> None:
        sections = (monitor_config.csv_monitor, monitor_config.tensorboard, monitor_config.wandb)
        self.enabled = any(section.enabled for section in sections)
        """Whether anything is written, on this rank or on another."""
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        if monitors is None:
            monitors = monitors_in(*sections) if is_first else ()
            weakref.finalize(self, _close, monitors)  # scripts never close one
        self._monitors = monitors

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write a point of each figure: its name, its value, and the number of samples or steps it stands over."""
        for name, value, place in event_list:
            for monitor in self._monitors:
                monitor.write(place, {name: float(value)})


def _close(monitors: Sequence[Monitor]) -> None:
    for monitor in monitors:
        monitor.close()

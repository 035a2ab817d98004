"""How long something was running."""

from __future__ import annotations

import time


class BusyClock:
    """Wall-clock seconds in which something was running; in all, and between the last two marks."""

    def __init__(self) -> None:
        self.last_step_s = 0.0
        self._total_s = 0.0
        self._at_mark_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def stop(self) -> None:
        if self._since is not None:
            self._total_s += time.monotonic() - self._since
            self._since = None

    def total_s(self) -> float:
        return self._total_s + (0.0 if self._since is None else time.monotonic() - self._since)

    def mark(self) -> None:
        now_s = self.total_s()
        self.last_step_s = now_s - self._at_mark_s
        self._at_mark_s = now_s

"""DeepSpeed's dynamic loss scale, told as its documentation tells it: by the number of the step. Knows no engine."""

from __future__ import annotations


class PlainScale:
    def __init__(self, *, power: int, window: int, hysteresis: int, consecutive: bool, least: float = 1.0) -> None:
        self.scale = 2.0**power
        self.window, self.hysteresis, self.consecutive, self.least = window, hysteresis, consecutive, least
        self.shifts_left = hysteresis
        self.step, self.last_overflow = 0, -1

    def update(self, *, overflow: bool) -> None:
        """Raises OverflowError at the least scale."""
        if overflow:
            if self.hysteresis == 1 or self.shifts_left == 1:
                if self.scale == self.least:
                    raise OverflowError
                self.scale = max(self.scale / 2, self.least)
            else:
                self.shifts_left -= 1
            self.last_overflow = self.step
        else:
            if self.consecutive:
                self.shifts_left = self.hysteresis
            stable = self.step - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.shifts_left = self.hysteresis
                self.scale *= 2
        self.step += 1

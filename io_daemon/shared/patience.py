"""How much longer to wait for somebody else."""

from __future__ import annotations

import time
from typing import Final

SLICE_S: Final = 1.0
CHARGED_S_MAX: Final = 2.0


class Patience:
    """Time that is waited in slices. What passes while this process does not run, because it is stopped or its whole
    container is frozen, is hardly counted: whoever is waited for may not have run either, or may have answered long
    since. So a slice is charged with CHARGED_S_MAX at most."""

    def __init__(self, timeout_s: float) -> None:
        self._left_s = timeout_s
        self._looked_s = time.monotonic()

    def slice_s(self) -> float:
        """Seconds to wait at most before this is asked again, having looked once more whether the wait is over; 0 when
        the patience is at its end."""
        now_s = time.monotonic()
        self._left_s -= min(now_s - self._looked_s, CHARGED_S_MAX)
        self._looked_s = now_s
        return max(0.0, min(self._left_s, SLICE_S))

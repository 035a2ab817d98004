"""What of one tenant's I/O is queued at the devices or runs on them: how much, and how long there was any."""

from __future__ import annotations

import asyncio
import time


class InFlight:
    def __init__(self) -> None:
        self.num_requests = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._ended_s = 0.0
        """Length of all stretches that are over."""
        self._since: float | None = None

    def count(self, change: int) -> None:
        """So many requests more; fewer, if negative."""
        self.num_requests += change
        if self.num_requests:
            self._quiet.clear()
            if self._since is None:
                self._since = time.monotonic()
        else:
            self._quiet.set()
            self._ended_s, self._since = self.total_s, None

    async def end(self) -> None:
        """Wait until there is none."""
        await self._quiet.wait()

    @property
    def total_s(self) -> float:
        """Wall-clock seconds in which there was any."""
        return self._ended_s + (0.0 if self._since is None else time.monotonic() - self._since)

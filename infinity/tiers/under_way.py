"""Leases whose bytes are under way between the host and a device: given back once they are copied, and not before.

Nobody waits for a copy by itself. That is over when many others are under way, when somebody needs frames, and before
anybody is given the same chunk again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Final

import torch

from infinity.tiers.base import Lease

UNDER_WAY_MAX: Final = 8


@dataclass(frozen=True)
class Copying:
    lease: Lease
    copied: torch.Event
    works: Sequence[Future[None]] = ()
    """What is done with the bytes on the host once they are copied."""
    keeps: object = field(default=None, kw_only=True)
    """Has the memory that is copied from."""
    dirty: int = field(default=0, kw_only=True)
    dead: int = field(default=0, kw_only=True)


class UnderWay:
    """Any thread may call anything: whoever waits for frames may not be the one that copies."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._copying: deque[Copying] = deque()

    def add(self, copying: Copying) -> None:
        with self._lock:
            self._copying.append(copying)
            while len(self._copying) > UNDER_WAY_MAX:
                self._end_first()

    def settle(self) -> None:
        """Wait until nothing is under way."""
        with self._lock:
            while self._copying:
                self._end_first()

    def settle_chunk(self, chunk: int) -> None:
        """Wait until nothing of the chunk is."""
        if self._copying and any(copying.lease.chunk == chunk for copying in list(self._copying)):
            self.settle()

    def _end_first(self) -> None:
        first = self._copying.popleft()
        try:
            wait(first.works)
            first.copied.synchronize()
            for work in first.works:
                work.result()
        except BaseException:
            first.lease.release()
            raise
        first.lease.release(dirty=first.dirty, dead=first.dead)

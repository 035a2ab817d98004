"""Leases whose bytes are under way between the host and a device: given back once they are copied, and not before.

Nobody waits for a copy by itself. That is over when many others are under way, when somebody needs frames, and before
anybody is given the same chunk again. What fails is told to who trains, whoever saw it first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
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
        self.failure: Exception | None = None
        """The first of those that ended otherwise, until it is forgotten: what was to be written is not."""

    def add(self, copying: Copying) -> None:
        """Raises the failure of an earlier one."""
        with self._lock:
            self._copying.append(copying)
            while len(self._copying) > UNDER_WAY_MAX:
                self._end_first()
        self._tell()

    def end_all(self) -> None:
        """Wait until nothing is under way."""
        with self._lock:
            while self._copying:
                self._end_first()

    def settle(self) -> None:
        """``end_all``, and raise what has failed."""
        self.end_all()
        self._tell()

    def settle_chunk(self, chunk: int) -> None:
        """Wait until nothing of the chunk is under way."""
        with self._lock:
            if not any(copying.lease.chunk == chunk for copying in self._copying):
                return
        self.settle()

    def forget(self) -> None:
        """Nobody needs what was to be written: wait for the rest, and forget what has failed."""
        self.end_all()
        self.failure = None

    def _tell(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _end_first(self) -> None:
        """An interrupt leaves it under way: its frames are still written."""
        first = self._copying[0]
        wait(first.works)
        try:
            first.copied.synchronize()
            for work in first.works:
                work.result()
        except Exception as error:  # noqa: BLE001 (told to who trains)
            self._fail(first, error)
            return
        self._copying.popleft()
        try:
            first.lease.release(dirty=first.dirty, dead=first.dead)
        except Exception as error:  # noqa: BLE001 (the same)
            self.failure = self.failure or error

    def _fail(self, first: Copying, error: Exception) -> None:
        self._copying.popleft()
        self.failure = self.failure or error
        with suppress(Exception):  # the first error says what is wrong
            first.lease.release()

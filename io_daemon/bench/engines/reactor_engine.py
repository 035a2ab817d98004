"""The daemon's own reactor under a benchmark: the same thread, engines and queue that training uses."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from io_daemon._native import BenchReactor, Region
from io_daemon.bench.engines.engine import Counters, Headers, Places, Writes
from io_daemon.bench.latency import Histogram, Latencies
from io_daemon.errors import DeviceIOError
from io_daemon.shared.protocol import PAGE_BYTES, Status

REAP_MAX: Final = 64
CLOSE_TIMEOUT_S: Final = 30.0


class ReactorEngine:
    """A ``BlockEngine`` over io_uring, libaio or posix."""

    def __init__(
        self,
        engine: str,
        fd: int,
        arena: Region,
        bs: int,
        iodepth: int,
        path: str,
        faults: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        """``fd`` stays open until ``close``; ``path`` names it in errors; ``faults`` as ``BenchReactor`` takes them,
        for tests. Raises OSError if the engine cannot start, ValueError for an iodepth beyond 4096."""
        self._fd = fd
        self._path = path
        self._bs = bs
        self._in_flight: dict[int, tuple[Writes, Places]] = {}
        block_bytes = -(-bs // PAGE_BYTES) * PAGE_BYTES
        self._reactor = BenchReactor(engine, iodepth, block_bytes, faults=faults)
        self._file = self._reactor.add_file(fd)
        self._buffer = self._reactor.add_buffer(arena)
        self._event_fd = self._reactor.event_fd
        self._poll = select.poll()
        self._poll.register(self._event_fd, select.POLLIN)

    @property
    def name(self) -> str:
        return self._reactor.engine

    def submit(
        self, tag: int, writes: Writes, offsets: Places, slots: Places | None = None, headers: Headers | None = None
    ) -> None:
        places = None if slots is None else slots * np.uint64(self._bs)
        self._reactor.submit_blocks(tag, self._file, writes, offsets, self._buffer, places, self._bs, headers)
        self._in_flight[tag] = (writes, offsets)

    def reap(self, timeout_s: float) -> list[int]:
        completions = self._reap(timeout_s)
        failed = None
        for tag, status, error_number, offset, expected, actual in completions:
            writes, offsets = self._in_flight.pop(tag)
            if status != Status.OK:
                operation = "write" if writes[offsets == offset][0] else "read"
                failed = failed or self._error(error_number, offset, expected, actual, operation)
        if failed is not None:
            raise failed
        return [completion[0] for completion in completions]

    def _reap(self, timeout_s: float) -> list[tuple[int, int, int, int, int, int]]:
        """Completions that are there, at most ``REAP_MAX``; sleeps only if there are none."""
        deadline = time.monotonic() + timeout_s
        while not (completions := self._reactor.reap(REAP_MAX)):
            if not self._poll.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                return []
            os.eventfd_read(self._event_fd)  # maybe of what an earlier call has reaped already: look again
        return completions

    def counters(self) -> Counters:
        stats = self._reactor.stats()
        return Counters(
            stats["bytes_read"], stats["bytes_written"], stats["num_reads"], stats["num_writes"], stats["num_short"]
        )

    def latencies(self) -> Latencies:
        return Latencies.of(self._reactor)

    def clat(self) -> Histogram:
        return Histogram(**self._reactor.clat())

    def reset_latencies(self) -> None:
        self._reactor.reset_latencies()

    def sync(self) -> None:
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} batches are in flight: sync covers only what has ended")
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._error(error.errno or errno.EIO, 0, 0, 0, "fsync") from error

    def close(self) -> None:
        if not self._reactor.close(int(CLOSE_TIMEOUT_S * 1000)):
            raise self._error(errno.ETIMEDOUT, 0, 0, 0, "close")

    def _error(self, error_number: int, offset: int, expected: int, actual: int, operation: str) -> DeviceIOError:
        return DeviceIOError(
            errno=error_number,
            path=self._path,
            offset=offset,
            expected_bytes=expected,
            actual_bytes=actual,
            operation=operation,
        )

"""One file under load: batches from a workload into an engine, laid out before and verified after."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region
from io_daemon.bench.engines.engine import BlockEngine
from io_daemon.bench.pattern import Pattern
from io_daemon.bench.settings import IoSettings, refused_buffers
from io_daemon.bench.target import DATA_OFFSET, Target
from io_daemon.bench.workload import Batch, Workload
from io_daemon.errors import DeviceIOError
from io_daemon.machine.buffers import Buffers, open_buffers

BATCH_READS_S, BATCH_WRITES_S = 0.2, 0.05
"""One batch has so many seconds of I/O: Python's share of each I/O becomes small, and a stop does not take long. One
that would pass the write limit is not begun, so batches with writes in them are shorter."""
BATCH_IOS_MIN, BATCH_IOS_MAX = 4, 4096
BATCH_SHARE_MAX: Final = 1 / 8
"""A batch takes at most this part of the measured time: most of a shorter round would be in flight at its end."""
FILE_SHARE_MAX: Final = 1 / 4
"""A batch with writes takes at most this part of the file: no block is to be in flight twice."""
BATCHES_AHEAD: Final = 8
"""Planned at once: numpy costs per call, not per I/O."""
NUM_BATCHES: Final = 2
"""Two are in flight. Under load none is shorter than the I/O depth, so that the device never waits for Python."""
VERIFIED_BYTES: Final = 32 << 20
"""One batch has so many bytes where what is read is verified."""
STALL_TIMEOUT_S: Final = 60.0
REAP_TIMEOUT_S: Final = 1.0
BAD_BLOCKS_SHOWN: Final = 8

OpenEngine = Callable[[Target, Region], BlockEngine]


def buffer_bytes(settings: IoSettings) -> int:
    """The size of one job's arena."""
    return (2 * settings.iodepth + NUM_BATCHES * settings.verify * ios_verified(settings)) * settings.bs


def ios_verified(settings: IoSettings) -> int:
    """In one batch, where what is read is looked at."""
    return min(max(VERIFIED_BYTES // settings.bs, BATCH_IOS_MIN), settings.num_blocks)


@contextmanager
def open_buffers_for(settings: IoSettings, num_bytes: int) -> Iterator[Buffers]:
    """Raises ConfigError, of the setting to lower, if the machine does not give them."""
    with ExitStack() as stack:
        try:
            buffers = stack.enter_context(open_buffers(num_bytes))
        except OSError as error:
            problem = f"the machine does not give {num_bytes} bytes for buffers ({error.strerror})"
            raise refused_buffers(settings, problem) from error
        yield buffers


class WriteAllowance:
    """What all jobs together may still write. Thread-safe."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._lock = num_bytes, threading.Lock()
        self.spent = threading.Event()
        """Somebody wanted to write more than was left."""

    def take(self, num_bytes: int) -> bool:
        """Whether so much may be written now."""
        with self._lock:
            if num_bytes > self._num_bytes:
                self.spent.set()
                return False
            self._num_bytes -= num_bytes
            return True


class Job:
    """Owns its engine and its arena. Not thread-safe: one thread runs a job.

    Arena: what is written comes from the first ``iodepth`` slots, what is read goes into the next ``iodepth``, and
    what is read to be looked at into those behind them, a batch apart."""

    def __init__(
        self, settings: IoSettings, target: Target, job: int, open_engine: OpenEngine, allowance: WriteAllowance
    ) -> None:
        self.target = target
        self._settings, self._allowance = settings, allowance
        self._number = job
        bs, depth = settings.bs, settings.iodepth
        self._ios_min = min(max(depth, BATCH_IOS_MIN), settings.num_blocks)
        ios_max = int(settings.num_blocks * FILE_SHARE_MAX) if settings.writes else BATCH_IOS_MAX
        self._ios_max = max(self._ios_min, min(ios_max, BATCH_IOS_MAX))
        self._ios_verified = ios_verified(settings)
        num_bytes = buffer_bytes(settings)
        with open_buffers_for(settings, num_bytes) as buffers:
            arena, self.has_huge_pages = buffers.region, buffers.has_huge_pages
        slots = arena.array()[:num_bytes].reshape(-1, bs)
        self._kept = slots[2 * depth :]
        self._pattern = Pattern(slots[:depth], settings.num_blocks, settings.seed * 65536 + job)
        self._being_written = np.zeros(settings.num_blocks, np.bool_)
        self._idle = list(range(NUM_BATCHES))
        self._num_ended = 0
        self.engine = open_engine(target, arena)

    def lay_out(self, progress: Callable[[int], None], should_stop: Callable[[], bool]) -> None:
        """Write every block once, in order; tells ``progress`` bytes as it goes."""
        self._perform(self._every_block(write=True, progress=progress, should_stop=should_stop), writes=True)
        self.engine.sync()

    def load(self, should_stop: Callable[[], bool]) -> None:
        """The workload from its beginning, until told to stop, or no more may be written, and everything in flight has
        ended."""
        workload = Workload(self._settings, self._number)
        self._perform(self._endless(workload, should_stop), writes=self._settings.writes)

    def verify(self, progress: Callable[[int], None], should_stop: Callable[[], bool]) -> tuple[int, list[str]]:
        """Read every block back and compare it with what was written last: how many differ, and the first of them in
        words."""
        num_bad, shown = 0, list[str]()

        def check(blocks: NDArray[np.uint64], batch: int) -> None:
            nonlocal num_bad
            first = batch * self._ios_verified
            found = self._kept[first : first + blocks.size]
            for block, fault in self._pattern.find_faults(blocks, found):
                num_bad += 1
                if len(shown) < BAD_BLOCKS_SHOWN:
                    offset = DATA_OFFSET + block * self._settings.bs
                    shown.append(f"{self.target.path} at offset {offset}: {fault}")

        batches = self._every_block(write=False, progress=progress, should_stop=should_stop)
        self._perform(batches, writes=False, check=check)
        return num_bad, shown

    def close(self) -> None:
        """Raises DeviceIOError if I/O in flight never ends."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _every_block(
        self, *, write: bool, progress: Callable[[int], None], should_stop: Callable[[], bool]
    ) -> Iterator[Batch]:
        for begin in range(0, self._settings.num_blocks, self._ios_verified):
            if should_stop():
                return
            blocks = np.arange(begin, min(begin + self._ios_verified, self._settings.num_blocks), dtype=np.uint64)
            if write:
                self._allowance.take(blocks.size * self._settings.bs)  # it is there: see ``check_limit``
            yield Batch(np.full(blocks.size, write, np.uint8), blocks)
            progress(blocks.size * self._settings.bs)

    def _endless(self, workload: Workload, should_stop: Callable[[], bool]) -> Iterator[Batch]:
        begin_s, num_before = time.perf_counter(), self._num_ended
        num_ios = self._ios_min
        batch_s = BATCH_WRITES_S if self._settings.writes else BATCH_READS_S
        batch_s = min(batch_s, BATCH_SHARE_MAX * self._settings.runtime_s)
        while True:
            ahead = workload.next(BATCHES_AHEAD * num_ios)
            for begin in range(0, ahead.blocks.size, num_ios):
                batch = Batch(ahead.writes[begin : begin + num_ios], ahead.blocks[begin : begin + num_ios])
                if should_stop() or not self._allowance.take(batch.written.size * self._settings.bs):
                    return
                yield batch
            now_s = time.perf_counter()
            rate = (self._num_ended - num_before) / (now_s - begin_s)
            begin_s, num_before = now_s, self._num_ended
            num_ios = min(max(int(rate * batch_s), self._ios_min), self._ios_max)

    def _perform(
        self,
        batches: Iterator[Batch],
        *,
        writes: bool,
        check: Callable[[NDArray[np.uint64], int], None] | None = None,
    ) -> None:
        """Keep the engine supplied until the batches are used up, then wait for the last. ``writes``: any of them may.
        With ``check`` what is read is kept for it to be looked at."""
        in_flight: dict[int, Batch] = {}
        batch = next(batches, None)
        while batch is not None or in_flight:
            while batch is not None and self._idle and not (writes and self._being_written[batch.written].any()):
                number = self._idle.pop()
                in_flight[number] = batch
                self._submit(number, batch, writes=writes, keep=check is not None)
                batch = next(batches, None)
            for number in self._reap():
                ended = in_flight.pop(number)
                self._num_ended += ended.blocks.size
                if writes:
                    self._being_written[ended.written] = False
                if check is not None:
                    check(ended.blocks, number)
                self._idle.append(number)

    def _submit(self, number: int, batch: Batch, *, writes: bool, keep: bool) -> None:
        offsets = batch.blocks * np.uint64(self._settings.bs) + np.uint64(DATA_OFFSET)
        slots = headers = None
        if keep:
            first = 2 * self._settings.iodepth + number * self._ios_verified
            slots = np.arange(first, first + batch.blocks.size, dtype=np.uint64)
        if writes:
            # two writes of a block in flight: which of them came last would be anybody's guess
            self._being_written[batch.written] = True
            headers = self._pattern.stamps(batch.blocks, batch.is_write)
        self.engine.submit(number, batch.writes, offsets, slots, headers)

    def _reap(self) -> list[int]:
        """Batches that have ended. A batch may take as long as it likes while any I/O still ends."""
        before, deadline = None, 0.0
        while True:
            ended = self.engine.reap(REAP_TIMEOUT_S)
            if ended:
                return ended
            counters = self.engine.counters()
            if counters != before:
                before, deadline = counters, time.monotonic() + STALL_TIMEOUT_S
            if time.monotonic() > deadline:
                raise DeviceIOError(
                    errno=0,
                    path=str(self.target.path),
                    offset=0,
                    expected_bytes=self._settings.bs,
                    actual_bytes=0,
                    operation=f"I/O that has not ended within {STALL_TIMEOUT_S:g} s",
                )

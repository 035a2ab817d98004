"""One file under load: batches from a workload into an engine, laid out before and verified after."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region
from io_daemon.bench.engines.engine import BlockEngine
from io_daemon.bench.pattern import Pattern
from io_daemon.bench.result import Verification
from io_daemon.bench.settings import IoSettings
from io_daemon.bench.target import DATA_OFFSET, Target
from io_daemon.bench.workload import Batch, Workload
from io_daemon.errors import ConfigError, DeviceIOError
from io_daemon.protocol import PAGE_BYTES

BATCH_BYTES: Final = 64 << 20
BATCH_IOS_MIN, BATCH_IOS_MAX = 4, 512
BATCHES_AHEAD: Final = 64
"""Planned at once: numpy costs per call, not per I/O."""
SPARE_BATCHES: Final = 1
"""Beyond the I/O depth, so that the device never waits for Python."""
STALL_TIMEOUT_S: Final = 60.0
REAP_TIMEOUT_S: Final = 1.0
BAD_BLOCKS_SHOWN: Final = 8

OpenEngine = Callable[[Target, Region], BlockEngine]


def batch_ios(bs: int) -> int:
    """I/Os handed to an engine at once: enough that Python's share of each is small."""
    return max(BATCH_IOS_MIN, min(BATCH_IOS_MAX, BATCH_BYTES // bs))


class Job:
    """Owns its engine and its arena. Not thread-safe: one thread runs a job."""

    def __init__(self, settings: IoSettings, target: Target, job: int, open_engine: OpenEngine) -> None:
        self.target = target
        self._settings = settings
        self._batch_ios = min(batch_ios(settings.bs), settings.num_blocks)  # no block twice in a batch
        self._num_batches = -(-settings.iodepth // self._batch_ios) + SPARE_BATCHES
        num_slots = self._num_batches * self._batch_ios
        # the upper half of the arena is where reads go: what was written stays to be compared with
        self._arena = _make_arena(2 * num_slots * settings.bs)
        slots = self._arena.array()[: 2 * num_slots * settings.bs].reshape(2 * num_slots, settings.bs)
        self._found = slots[num_slots:].reshape(self._num_batches, self._batch_ios, settings.bs)
        numbers = np.arange(num_slots, dtype=np.uint64).reshape(self._num_batches, self._batch_ios)
        self._write_slots = numbers
        self._kept_slots = numbers + np.uint64(num_slots)
        """Of reads that are looked at."""
        self._read_slots = numbers % np.uint64(min(settings.iodepth, num_slots)) + np.uint64(num_slots)
        """Of reads that are not: as few as are in flight, as warm in the caches as another program's would be."""
        self._pattern = Pattern(slots[:num_slots], settings.num_blocks, settings.seed * 65536 + job)
        self._number = job
        self._being_written = np.zeros(settings.num_blocks, np.bool_)
        self._idle = list(range(self._num_batches))
        self.engine = open_engine(target, self._arena)

    def lay_out(self, progress: Callable[[int], None], should_stop: Callable[[], bool]) -> None:
        """Write every block once, in order; tells ``progress`` bytes as it goes."""
        self._perform(self._every_block(write=True, progress=progress, should_stop=should_stop))
        self.engine.sync()

    def load(self, should_stop: Callable[[], bool]) -> None:
        """The workload from its beginning, until told to stop and everything in flight has ended."""
        self._perform(self._endless(Workload(self._settings, self._number), should_stop))

    def verify(self, progress: Callable[[int], None], should_stop: Callable[[], bool]) -> Verification:
        """Read every block back and compare it with what was written last."""
        begin = time.perf_counter()
        num_bad, shown = 0, list[str]()

        def check(blocks: NDArray[np.uint64], batch: int) -> None:
            nonlocal num_bad
            found = self._found[batch, : blocks.size]
            for block, fault in self._pattern.find_faults(blocks, found):
                num_bad += 1
                if len(shown) < BAD_BLOCKS_SHOWN:
                    offset = DATA_OFFSET + block * self._settings.bs
                    shown.append(f"{self.target.path} at offset {offset}: {fault}")

        self._perform(self._every_block(write=False, progress=progress, should_stop=should_stop), check)
        return Verification(
            num_blocks=self._settings.num_blocks,
            num_bad_blocks=num_bad,
            seconds=time.perf_counter() - begin,
            bad=shown,
        )

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
        for begin in range(0, self._settings.num_blocks, self._batch_ios):
            if should_stop():
                return
            blocks = np.arange(begin, min(begin + self._batch_ios, self._settings.num_blocks), dtype=np.uint64)
            yield Batch(np.full(blocks.size, write, np.uint8), blocks)
            progress(blocks.size * self._settings.bs)

    def _endless(self, workload: Workload, should_stop: Callable[[], bool]) -> Iterator[Batch]:
        while True:
            ahead = workload.next(BATCHES_AHEAD * self._batch_ios)
            for begin in range(0, ahead.blocks.size, self._batch_ios):
                if should_stop():
                    return
                end = begin + self._batch_ios
                yield Batch(ahead.writes[begin:end], ahead.blocks[begin:end])

    def _perform(
        self, batches: Iterator[Batch], check: Callable[[NDArray[np.uint64], int], None] | None = None
    ) -> None:
        """Keep the engine supplied until the batches are used up, then wait for the last."""
        read_slots = self._read_slots if check is None else self._kept_slots
        in_flight: dict[int, Batch] = {}
        batch = next(batches, None)
        while batch is not None or in_flight:
            while batch is not None and self._idle and not self._overtakes(batch):
                number = self._idle.pop()
                in_flight[number] = batch
                self._submit(number, batch, read_slots[number])
                batch = next(batches, None)
            for number in self._reap():
                ended = in_flight.pop(number)
                self._being_written[ended.blocks[ended.writes == 1]] = False
                if check is not None:
                    check(ended.blocks, number)
                self._idle.append(number)

    def _overtakes(self, batch: Batch) -> bool:
        """It writes a block that is being written: which of the two came last would be anybody's guess. Happens when
        one write takes as long as a whole round of the file."""
        return bool(self._being_written[batch.blocks[batch.writes == 1]].any())

    def _submit(self, number: int, batch: Batch, slots: NDArray[np.uint64]) -> None:
        num_ios = batch.blocks.size
        num_writes = np.count_nonzero(batch.writes)
        slots = slots[:num_ios]
        if num_writes:
            write_slots = self._write_slots[number, :num_ios]
            is_write = batch.writes == 1
            self._being_written[batch.blocks[is_write]] = True
            self._pattern.stamp(batch.blocks[is_write], write_slots[is_write])
            slots = write_slots if num_writes == num_ios else np.where(is_write, write_slots, slots)
        offsets = batch.blocks * np.uint64(self._settings.bs) + np.uint64(DATA_OFFSET)
        self.engine.submit(number, batch.writes, offsets, slots)

    def _reap(self) -> list[int]:
        deadline = time.monotonic() + STALL_TIMEOUT_S
        while True:
            ended = self.engine.reap(REAP_TIMEOUT_S)
            if ended:
                return ended
            if time.monotonic() > deadline:
                raise DeviceIOError(
                    errno=0,
                    path=str(self.target.path),
                    offset=0,
                    expected_bytes=self._settings.bs,
                    actual_bytes=0,
                    operation=f"I/O that has not ended within {STALL_TIMEOUT_S:g} s",
                )


def _make_arena(num_bytes: int) -> Region:
    fd = os.memfd_create("infinity-bench", os.MFD_CLOEXEC)
    try:
        os.truncate(fd, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
        region = Region(fd, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
        region.prefault(min(len(os.sched_getaffinity(0)), 8))
    except OSError as error:
        raise ConfigError(
            "iodepth", num_bytes, f"the machine does not give this much memory for buffers ({error.strerror})"
        ) from error
    finally:
        os.close(fd)
    return region

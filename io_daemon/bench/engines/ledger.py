"""What a Python engine was given and what has ended: batches, bytes and latencies, from any thread."""

from __future__ import annotations

import errno
import os
import queue
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from io_daemon.bench.engines.engine import Counters, Headers, Places, Writes
from io_daemon.bench.latency import Histogram, Latencies
from io_daemon.errors import DeviceIOError
from io_daemon.shared.protocol import PAGE_BYTES


class BlockIo(NamedTuple):
    """One I/O: ``bs`` bytes between ``offset`` of the file and a slot of the arena."""

    tag: int
    write: bool
    offset: int
    slot: int | None
    header: Headers | None
    """[h]: to be copied over the beginning of every page of the slot before it is written."""

    def write_header(self, slot: NDArray[np.uint8]) -> None:
        if self.header is not None:
            for page in range(0, slot.size, PAGE_BYTES):
                slot[page : page + self.header.size] = self.header

    def slot_at(self, place: int, iodepth: int) -> int:
        """``place``: of ``iodepth`` in flight, where it is performed if it names no slot."""
        if self.slot is not None:
            return self.slot
        return place if self.write else iodepth + place


class Ledger:
    """Each I/O that ``begin`` returns is to be closed once, by ``end`` or by ``fail``; its batch ends with the last."""

    def __init__(self, path: str, bs: int) -> None:
        self._path = path
        self._bs = bs
        self._ended: queue.SimpleQueue[int | DeviceIOError] = queue.SimpleQueue()
        self._next_error: DeviceIOError | None = None
        self._lock = threading.Lock()  # guards all that follows
        self._num_left: dict[int, int] = {}
        self._num_unreaped = 0
        self._failed: dict[int, DeviceIOError] = {}
        self._counters = Counters(0, 0, 0, 0, 0)
        self._latencies = Latencies()

    def begin(
        self, tag: int, writes: Writes, offsets: Places, slots: Places | None, headers: Headers | None
    ) -> list[BlockIo]:
        num_ios = writes.size
        lengths = [len(column) for column in (writes, offsets, slots, headers) if column is not None]
        if num_ios == 0 or set(lengths) != {num_ios}:
            raise ValueError(f"a batch whose columns are of lengths {lengths}")
        with self._lock:
            self._num_left[tag] = num_ios
            self._num_unreaped += 1
        return [
            BlockIo(tag, write == 1, offset, slot, header if write else None)
            for write, offset, slot, header in zip(
                writes.tolist(),
                offsets.tolist(),
                [None] * num_ios if slots is None else slots.tolist(),
                [None] * num_ios if headers is None else headers,
                strict=True,
            )
        ]

    def end(self, io: BlockIo, slat_ns: int, clat_ns: int, num_short: int = 0) -> None:
        """All of its bytes have moved, after ``num_short`` transfers of fewer than asked for."""
        with self._lock:
            (self._latencies.write if io.write else self._latencies.read).record(slat_ns, clat_ns)
            self._counters = Counters(
                self._counters.read_bytes + (0 if io.write else self._bs),
                self._counters.write_bytes + (self._bs if io.write else 0),
                self._counters.num_reads + (not io.write),
                self._counters.num_writes + io.write,
                self._counters.num_short + num_short,
            )
            self._close(io)

    def fail(self, io: BlockIo, error: Exception | None, num_moved: int) -> None:
        """``error``: what the library raised, None of a transfer that came short."""
        with self._lock:
            self._failed.setdefault(
                io.tag,
                DeviceIOError(
                    errno=0 if error is None else errno_of(error),
                    path=self._path,
                    offset=io.offset,
                    expected_bytes=self._bs,
                    actual_bytes=num_moved,
                    operation="write" if io.write else "read",
                ),
            )
            self._close(io)

    def _close(self, io: BlockIo) -> None:
        self._num_left[io.tag] -= 1
        if self._num_left[io.tag] == 0:
            del self._num_left[io.tag]
            self._ended.put(self._failed.pop(io.tag, io.tag))

    def reap(self, timeout_s: float) -> list[int]:
        """See ``BlockEngine.reap``. What ended before a batch that failed is reported, and the failure next time."""
        if self._next_error is not None:
            error, self._next_error = self._next_error, None
            raise error
        tags: list[int] = []
        try:
            ended = self._ended.get(timeout=timeout_s) if timeout_s > 0 else self._ended.get_nowait()
            while True:
                with self._lock:
                    self._num_unreaped -= 1
                if isinstance(ended, DeviceIOError):
                    if not tags:
                        raise ended
                    self._next_error = ended
                    return tags
                tags.append(ended)
                ended = self._ended.get_nowait()
        except queue.Empty:
            return tags

    def sync(self, fd: int) -> None:
        """See ``BlockEngine.sync``."""
        with self._lock:
            if self._num_unreaped:
                raise RuntimeError(f"{self._num_unreaped} batches are in flight: sync covers only what has ended")
        try:
            os.fsync(fd)
        except OSError as error:
            raise self.error(error.errno or errno.EIO, "fsync") from error

    def error(self, error_number: int, operation: str) -> DeviceIOError:
        """The error speaks of the file as a whole."""
        return DeviceIOError(
            errno=error_number, path=self._path, offset=0, expected_bytes=0, actual_bytes=0, operation=operation
        )

    def counters(self) -> Counters:
        with self._lock:
            return self._counters

    def latencies(self) -> Latencies:
        with self._lock:
            return self._latencies.copy()

    def clat(self) -> Histogram:
        with self._lock:
            return self._latencies.read.clat + self._latencies.write.clat

    def reset_latencies(self) -> None:
        with self._lock:
            self._latencies = Latencies()


def errno_of(error: Exception) -> int:
    """An OSError has its own; a library that only says it in words ends them with one."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    return next((number for number in errno.errorcode if str(error).endswith(os.strerror(number))), errno.EIO)


class LedgerEngine:
    """What the Python engines answer from their ledger; ``_fd`` is the file that they have opened."""

    _ledger: Ledger
    _fd: int

    def reap(self, timeout_s: float) -> list[int]:
        return self._ledger.reap(timeout_s)

    def counters(self) -> Counters:
        return self._ledger.counters()

    def latencies(self) -> Latencies:
        return self._ledger.latencies()

    def clat(self) -> Histogram:
        return self._ledger.clat()

    def reset_latencies(self) -> None:
        self._ledger.reset_latencies()

    def sync(self) -> None:
        self._ledger.sync(self._fd)

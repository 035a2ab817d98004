"""Who performs the block I/Os of one job: the daemon's reactor, or another library to compare it with.

An engine is given batches of I/Os, each of ``bs`` bytes between one place of one file and one slot of an arena, keeps
at most ``iodepth`` of them in flight, and reports a batch once all of it has ended. It neither chooses places nor looks
at bytes. An I/O that names no slot goes through one of the first ``iodepth`` if it is a write, of the next ``iodepth``
if it is a read: so a load takes no more memory than it has in flight, and goes over it while it is warm, as fio's does,
and what is written stays as it was. Latencies are taken per I/O, next to the system call, not per batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from io_daemon.bench.latency import Histogram, Latencies

Memory = Literal["host", "gpu"]
Writes = NDArray[np.uint8]
Places = NDArray[np.uint64]
Headers = NDArray[np.uint8]


class Counters(NamedTuple):
    """What was counted since the engine was made."""

    read_bytes: int
    write_bytes: int
    num_reads: int
    num_writes: int
    num_short: int
    """I/Os that moved fewer bytes than asked for and went on."""


class BlockEngine(Protocol):
    @property
    def name(self) -> str:
        """The engine's name, as ``--engine`` takes it."""

    def submit(
        self, tag: int, writes: Writes, offsets: Places, slots: Places | None = None, headers: Headers | None = None
    ) -> None:
        """Queue a batch of n; never blocks. ``writes``: [n], 1 for a write, 0 for a read. ``offsets``: [n], bytes in
        the file. ``slots``: [n], which ``bs`` bytes of the arena; None: as above, and then ``headers``, [n, h], are
        copied over the first h bytes of every 4 KiB of the slots of writes. In flight in the order given."""

    def reap(self, timeout_s: float) -> list[int]:
        """Tags of batches that have ended since; waits for one at most ``timeout_s``, then returns none.
        Raises DeviceIOError with errno, path and offset if an I/O of a batch failed; batches that ended beside
        it are then not reported."""

    def counters(self) -> Counters: ...

    def latencies(self) -> Latencies:
        """A copy of what has been counted since the last reset; of two of them the counts can be subtracted."""

    def clat(self) -> Histogram:
        """Likewise, reads and writes together, and little to copy: for samples."""

    def reset_latencies(self) -> None:
        """Count from here on: the ramp has ended."""

    def sync(self) -> None:
        """fsync. Nothing may be in flight. Raises DeviceIOError."""

    def close(self) -> None:
        """Give everything back, waiting for what is in flight. Idempotent. Raises DeviceIOError if that never ends."""

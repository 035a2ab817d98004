"""Who performs the block I/Os of one job: the daemon's reactor, or another library to compare it with.

An engine is given batches of I/Os, each of ``bs`` bytes between one place of one file and one slot of an arena, keeps
at most ``iodepth`` of them in flight, and reports a batch once all of it has ended. It neither chooses places nor looks
at bytes. An I/O that names no slot goes through one of the first ``iodepth`` if it is a write, of the next ``iodepth``
if it is a read: so a load takes no more memory than it has in flight, and goes over it while it is warm, as fio's does,
and what is written stays as it was. Latencies are taken per I/O, next to the system call, not per batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region, probe_engine
from io_daemon.bench.latency import Histogram, Latencies
from io_daemon.errors import ConfigError

REACTOR_ENGINES: Final = ("io_uring", "libaio", "posix")
"""Those that training uses."""
ENGINES: Final = (*REACTOR_ENGINES, "kvikio", "aiofiles")
Memory = Literal["host", "gpu"]
Writes = NDArray[np.uint8]
Places = NDArray[np.uint64]
Headers = NDArray[np.uint8]


class Counters(NamedTuple):
    """Since the engine was made."""

    read_bytes: int
    write_bytes: int
    num_reads: int
    num_writes: int
    num_short: int
    """I/Os that moved fewer bytes than asked for and went on."""


class BlockEngine(Protocol):
    @property
    def name(self) -> str:
        """As ``--engine`` names it."""

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


def engine_problem(name: str, memory: Memory = "host") -> str | None:
    """None if the engine works on this machine with its slots in this kind of memory, else one line of why not, with
    the remedy where there is one. Raises ConfigError for an unknown name."""
    if name not in ENGINES:
        raise ConfigError("engine", name, f"is none of {', '.join(ENGINES)}")
    if name == "kvikio":
        from io_daemon.bench.engines.kvikio_engine import kvikio_problem

        return kvikio_problem(memory)
    if memory == "gpu":
        return f"{name} moves host memory only: kvikio is the engine for GPU memory"
    return probe_engine(name) if name in REACTOR_ENGINES else None


def open_engine(
    name: str,
    fd: int,
    arena: Region,
    bs: int,
    iodepth: int,
    path: str,
    *,
    memory: Memory = "host",
    faults: Sequence[tuple[str, int, int]] = (),
) -> BlockEngine:
    """The engine of that name over the file that ``fd`` refers to, which stays the caller's; I/O is direct if the
    descriptor is. ``arena``: slots of ``bs`` bytes, ``2 * iodepth`` or more. ``path`` names the file in errors.
    ``memory="gpu"``: the I/O is between the file and GPU memory, and each block copied to or from its slot outside of
    the time that is counted.
    ``faults``, for tests of what stands above: as ``Reactor`` takes them, and only for the reactor's engines.
    Raises ConfigError if the engine does not work on this machine, OSError if it cannot start."""
    if (problem := engine_problem(name, memory)) is not None:
        raise ConfigError("engine", name, problem)
    if name in REACTOR_ENGINES:
        from io_daemon.bench.engines.reactor_engine import ReactorEngine

        return ReactorEngine(name, fd, arena, bs, iodepth, path, faults)
    if faults:
        raise ConfigError("engine", name, f"takes no faults; {', '.join(REACTOR_ENGINES)} do")
    if name == "kvikio":
        from io_daemon.bench.engines.kvikio_engine import KvikioEngine

        return KvikioEngine(fd, arena, bs, iodepth, path, memory)
    from io_daemon.bench.engines.aiofiles_engine import AiofilesEngine

    return AiofilesEngine(fd, arena, bs, iodepth, path)

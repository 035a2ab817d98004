"""kvikio as an engine: NVIDIA's cuFile, between NVMe and GPU memory or, without a GPU, host memory.

Its futures can be waited for but tell nobody when they are done, so ``iodepth`` threads wait, one for each I/O in
flight. kvikio performs them on a pool of its own, which the whole process shares.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import importlib.util
import os
import queue
import threading
import time
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region
from io_daemon.bench.engines.cuda_memory import CudaBytes, CudaMemory, device_problem, driver_problem
from io_daemon.bench.engines.engine import Headers, Memory, Places, Writes
from io_daemon.bench.engines.ledger import BlockIo, Ledger, LedgerEngine

CLOSE_TIMEOUT_S: Final = 30.0


def kvikio_problem(memory: Memory = "host") -> str | None:
    """None if kvikio works on this machine with slots in this kind of memory, else one line of why not."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed: pip install 'infinity[kvikio]'"
    problem = driver_problem() if memory == "host" else device_problem()
    if problem is not None:
        return problem
    try:
        importlib.import_module("kvikio")
    except Exception as error:  # noqa: BLE001 -- whatever its loaders of libraries raise
        return f"kvikio does not load: {' '.join(str(error).split())}"
    return None


class _Pool:
    """kvikio's threads: as many as the engines that are open may have in flight together."""

    lock: ClassVar = threading.Lock()
    num_threads: ClassVar = 0

    @classmethod
    def resize(cls, change: int) -> None:
        with cls.lock:
            cls.num_threads += change
            if cls.num_threads > 0:
                importlib.import_module("kvikio.defaults").set({"num_threads": cls.num_threads})


class KvikioEngine(LedgerEngine):
    """A ``BlockEngine``. slat: the call of pread or pwrite; clat: until its future is there.

    With ``memory="gpu"`` the I/O is between the file and GPU memory; what is to be written is copied there first and
    what was read is copied back afterwards, outside the time that is counted."""

    name: Final = "kvikio"

    def __init__(self, fd: int, arena: Region, bs: int, iodepth: int, path: str, memory: Memory = "host") -> None:
        """Opens the file that ``fd`` refers to anew, direct if ``fd`` is. Raises RuntimeError in kvikio's words."""
        kvikio = importlib.import_module("kvikio")
        self._bs = bs
        self._iodepth = iodepth
        self._slots = arena.array()[: arena.region_bytes // bs * bs].reshape(-1, bs)
        self._ledger = Ledger(path, bs)
        self._gpu = CudaMemory(bs * iodepth) if memory == "gpu" else None
        self._fd = os.dup(fd)
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        importlib.import_module("kvikio.defaults").set({"auto_direct_io_read": direct, "auto_direct_io_write": direct})
        try:
            self._file: Any = kvikio.CuFile(f"/proc/self/fd/{self._fd}", "r+")
        except BaseException:
            os.close(self._fd)
            raise
        _Pool.resize(iodepth)
        self._queue: queue.SimpleQueue[BlockIo | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(place,), name="io-kvikio", daemon=True)
            for place in range(iodepth)
        ]
        self._closed = False
        for thread in self._threads:
            thread.start()

    def submit(
        self, tag: int, writes: Writes, offsets: Places, slots: Places | None = None, headers: Headers | None = None
    ) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        for io in self._ledger.begin(tag, writes, offsets, slots, headers):
            self._queue.put(io)

    def _serve(self, place: int) -> None:
        gpu = None if self._gpu is None else self._gpu.view(place * self._bs, self._bs)
        while (io := self._queue.get()) is not None:
            try:
                self._perform(io, self._slots[io.slot_at(place, self._iodepth)], gpu)
            except Exception as error:  # noqa: BLE001 -- kvikio raises RuntimeError, ValueError and OSError
                is_short = str(error).endswith("EOF")  # its word for a read beyond the end
                self._ledger.fail(io, None if is_short else error, 0)

    def _perform(self, io: BlockIo, slot: NDArray[np.uint8], gpu: CudaBytes | None) -> None:
        io.write_header(slot)
        if self._gpu is not None and gpu is not None and io.write:
            self._gpu.copy_in(gpu, slot.ctypes.data)
        move = self._file.pwrite if io.write else self._file.pread
        begin_ns = time.perf_counter_ns()
        # One task a block: cut up, it would be several I/Os.
        future = move(slot if gpu is None else gpu, self._bs, io.offset, self._bs)
        started_ns = time.perf_counter_ns()
        num_moved = future.get()
        done_ns = time.perf_counter_ns()
        if self._gpu is not None and gpu is not None and not io.write:
            self._gpu.copy_out(gpu, slot.ctypes.data)
        if num_moved == self._bs:
            self._ledger.end(io, started_ns - begin_ns, done_ns - started_ns)
        else:
            self._ledger.fail(io, None, num_moved)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        if not self._threads:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            raise self._ledger.error(errno.ETIMEDOUT, "close")
        self._threads = []
        self._file.close()
        os.close(self._fd)
        if self._gpu is not None:
            self._gpu.close()
        _Pool.resize(-self._iodepth)

"""Files past the page cache: whole blocks of aligned memory, moved by a thread beside the caller's.

The cache would cost a copy page by page and evict what somebody may read again: 0.45 to 0.78 CPU seconds a GB were
measured, where blocks of 4 MiB took 0.06 at twice the rate. A filesystem without direct I/O gets the same calls.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch

from infinity.files.pieces import bytes_of

ALIGNMENT: Final = 4096
"""Addresses, offsets and lengths are multiples of it, which is no less than any drive's logical block."""
BLOCK_BYTES: Final = 4 << 20
WRITE_TIMEOUT_S: Final = 120.0
"""A drive has so long for a block: what it takes, however slowly, is waited for, and one that takes nothing is not."""
NUM_BLOCKS: Final = 3
"""One that is filled, or read from; one with the drive; one between them."""


def aligned_memory(num_bytes: int) -> torch.Tensor:
    """Memory of uint8 [``num_bytes``] on a page boundary, which is the system's again with its last view."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def open_direct(path: Path, flags: int) -> int:
    """A descriptor that passes the page cache by where the filesystem can. Raises OSError."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _set_direct(descriptor, direct=True)  # with O_CREAT, a filesystem that cannot would refuse and leave the file
    return descriptor


class WriteBehind:
    """Blocks of aligned memory to be filled, and a thread that writes them to wherever they belong. It ends with the
    process, which waits for no drive that takes nothing."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._free: list[torch.Tensor] = []
        self._num_made = 0
        self._in_flight: deque[tuple[Future[None], torch.Tensor, Path]] = deque()

    def take(self) -> torch.Tensor:
        """A block of uint8 [BLOCK_BYTES]. Raises the OSError of an earlier one."""
        if self._free:
            return self._free.pop()
        if self._num_made < NUM_BLOCKS:
            self._num_made += 1
            return aligned_memory(BLOCK_BYTES)
        return self._written()

    def write(self, path: Path, descriptor: int, block: torch.Tensor, num_bytes: int, offset: int) -> None:
        """Have the first ``num_bytes`` of a block written to a file of ``open_direct``; it may be taken again then."""
        own = os.dup(descriptor)  # of a drive that hangs, a thread may still be within this when the caller's is closed
        written: Future[None] = Future()
        written.add_done_callback(lambda _written: os.close(own))
        self._in_flight.append((written, block, path))
        self._works.put((written, partial(write, path, own, block[:num_bytes], offset)))
        if self._thread is None:
            thread = threading.Thread(target=_work_off, args=(self._works,), name="infinity-write", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # the interpreter ends, and has no new threads: a late save is still to be done
                self._works.put(None)
                _work_off(self._works)

    def drain(self) -> None:
        """All are written. Raises OSError."""
        while self._in_flight:
            self._free.append(self._written())

    def close(self) -> None:
        """What was not begun is not written; what was is waited for, but no longer than for a block."""
        self._works.put(None)
        wait([written for written, *_ in self._in_flight if not written.cancel()], WRITE_TIMEOUT_S)

    def _written(self) -> torch.Tensor:
        """The oldest block, when it is written. Raises OSError, also where the drive does not take it in time."""
        written, block, path = self._in_flight.popleft()
        try:
            written.result(WRITE_TIMEOUT_S)
        except TimeoutError as error:  # which a server's is, too
            if written.done():
                raise
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(path)) from error
        return block


def _work_off(works: SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    """One work after the other, until there is None."""
    while (next_one := works.get()) is not None:
        future, work = next_one
        if future.set_running_or_notify_cancel():
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (raised where somebody asks)
                future.set_exception(error)
            else:
                future.set_result(None)


class BlockWriter:
    """Appends to a new file; what is appended is copied at once and written behind."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.num_bytes = 0
        """Appended so far."""
        self._path, self._descriptor = path, open_direct(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        self._behind = WriteBehind()
        self._block: torch.Tensor | None = None

    def append(self, data: memoryview) -> None:
        """Append bytes. Raises the OSError of an earlier block."""
        done = 0
        while done < len(data):
            at = self.num_bytes % BLOCK_BYTES
            if self._block is None:
                self._block = self._behind.take()
            part = data[done : done + BLOCK_BYTES - at]
            np.copyto(self._block.numpy()[at : at + len(part)], np.frombuffer(part, dtype=np.uint8))
            done += len(part)
            self.num_bytes += len(part)
            if self.num_bytes % BLOCK_BYTES == 0:
                self._hand_over(self._block, BLOCK_BYTES)

    def align(self, num_bytes: int) -> None:
        """Append zeros until the size is a multiple of ``num_bytes``."""
        if missing := -self.num_bytes % num_bytes:
            self.append(memoryview(bytes(missing)))

    def finish(self) -> None:
        """Have it all on the drive. Raises OSError."""
        rest = self.num_bytes % BLOCK_BYTES
        if rest and self._block is not None:
            whole = -(-rest // ALIGNMENT) * ALIGNMENT
            self._block[rest:whole].zero_()
            self._hand_over(self._block, whole)
        self._behind.drain()
        os.ftruncate(self._descriptor, self.num_bytes)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Also of a file that is not finished."""
        self._behind.close()
        os.close(self._descriptor)

    def _hand_over(self, block: torch.Tensor, num_bytes: int) -> None:
        """Have the first bytes of the block written: it is the end of what there is."""
        begin = (self.num_bytes - 1) // BLOCK_BYTES * BLOCK_BYTES
        self._behind.write(self._path, self._descriptor, block, num_bytes, begin)
        self._block = None


def read_block(descriptor: int, begin: int, end: int, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Bytes [begin, end) of a file of ``open_direct``; fewer at its end.

    Args:
        memory: of ``aligned_memory``, to read into where it is large enough; else there is fresh one.

    Returns:
        A view of uint8 that lies in a page as the bytes lie in the file.

    Raises:
        OSError: the drive fails.
    """
    first = begin // ALIGNMENT * ALIGNMENT
    size = max(1, -(-(end - first) // ALIGNMENT)) * ALIGNMENT
    if memory is None or memory.numel() < size:
        memory = aligned_memory(size)
    view, done = bytes_of(memory[:size]), 0
    while done < end - first:
        got = _transfer(os.preadv, descriptor, [view[done:]], first + done)
        if got == 0:
            break
        done += got
    return memory[begin - first : min(done, end - first)]


def write(path: Path, descriptor: int, data: torch.Tensor, offset: int) -> None:
    """Write ``data``, uint8 [numel], at its place. Raises OSError, which names the file."""
    view, done = bytes_of(data), 0
    try:
        while done < len(view):
            done += _transfer(os.pwrite, descriptor, view[done:], offset + done)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _transfer(call: Callable[[int, Any, int], int], descriptor: int, memory: object, offset: int) -> int:
    """The bytes that ``call`` moved; through the page cache where the filesystem refuses the alignment."""
    try:
        return call(descriptor, memory, offset)
    except OSError as error:
        if error.errno != errno.EINVAL or not _set_direct(descriptor, direct=False):
            raise
    return call(descriptor, memory, offset)


def _set_direct(descriptor: int, *, direct: bool) -> bool:
    """Whether it was changed."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    if wanted == flags:
        return False
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True

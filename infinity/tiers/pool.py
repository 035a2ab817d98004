"""Memory for full weights that stays warm: one mapping in huge pages, from which groups take and to which they return.

A group's weights come and go several times a step. From the heap each time would cost a page fault for every 4 KiB, and
returning the heap's free pages, without which a process would grow with its model's depth, a walk and the same faults
again. Here the address space is reserved once, pages come with their first use and stay, and first fit keeps what is
used at the low end: the process grows to the most that was live at a time, and no further.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from io_daemon.policy.extents import ExtentAllocator
from io_daemon.shared.protocol import PAGE_BYTES, align_up

HUGE_PAGE_BYTES: Final = 2 << 20
ALIGNMENT_BYTES: Final = 64
"""Torch aligns its own memory so, and kernels may choose their way by it."""
SMALL_BYTES: Final = 1 << 16
"""What is smaller comes from the heap, whose allocator keeps such blocks warm and takes 1 µs, not 40."""
POISON: Final = 0xFF
"""Repeated, it is NaN in every floating dtype."""


class MemoryPool:
    """Blocks of at most ``num_bytes`` in all; what does not fit, is small, or is not on a CPU, is torch's own memory.

    A block goes back when the last tensor that shares its memory is gone, in whatever thread that is.
    """

    def __init__(self, num_bytes: int, device: torch.device, *, poison: bool = False) -> None:
        """``poison``: memory that went back reads as NaN."""
        self._device, self._poison = device, poison
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()
        """Places that went back and are not free yet: appending takes no lock, so it can happen anywhere."""
        self._places = ExtentAllocator(0, granule_bytes=ALIGNMENT_BYTES)
        if device.type == "cpu" and num_bytes > 0:
            self._reserve(align_up(num_bytes, HUGE_PAGE_BYTES))

    def _reserve(self, num_bytes: int) -> None:
        try:
            self._mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # the address space is limited
            return
        whole = np.frombuffer(self._mapping, dtype=np.uint8)
        self._first = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._memory = whole[self._first : self._first + num_bytes]
        self._places.grow(num_bytes)
        try:
            self._mapping.madvise(mmap.MADV_HUGEPAGE, self._first, num_bytes)
        except OSError:
            pass  # a kernel without them: ordinary pages

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] of undefined contents."""
        return self.empty_strided((numel,), (1,), dtype)

    def empty_strided(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of its own, without holes, of undefined contents."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES and not self._poison:
            return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        with self._lock:
            self._take_back()
            offset = self._places.allocate(num_bytes) if 0 < num_bytes <= self._places.free_bytes else None
            if offset is None:
                if num_bytes > 0:
                    self._give_back_pages()  # so that what comes from elsewhere comes in their stead
                return torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        block = _Block(self._memory[offset : offset + num_bytes], (offset, num_bytes), self._returned, self._poison)
        storage = torch.from_numpy(np.asarray(block)).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, torch.Size(shape), strides)

    def trim(self) -> None:
        """Give the pages of everything that is free back to the system."""
        with self._lock:
            self._take_back()
            self._give_back_pages()

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self._places.free_bytes

    def _take_back(self) -> None:
        while self._returned:
            self._places.free(*self._returned.popleft())

    def _give_back_pages(self) -> None:
        for offset, length in self._places.extents():
            start = align_up(offset, PAGE_BYTES)
            end = (offset + length) // PAGE_BYTES * PAGE_BYTES
            if start < end:
                self._mapping.madvise(mmap.MADV_DONTNEED, self._first + start, end - start)


class _Block:
    """What all tensors of a block refer to; its end is the block's."""

    __slots__ = ("__array_interface__", "_memory", "_place", "_poison", "_returned")

    def __init__(
        self, memory: np.ndarray[Any, Any], place: tuple[int, int], returned: deque[tuple[int, int]], poison: bool
    ) -> None:
        self._memory, self._place, self._returned, self._poison = memory, place, returned, poison
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        if self._poison:
            self._memory.fill(POISON)
        self._returned.append(self._place)

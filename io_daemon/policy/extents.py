"""Free space of one swap file, as sorted, coalesced extents (offset, length). Pure.

First fit. Freeing and allocating are separate, so a new version of an object can be given space before the old
version's space is returned (out-of-place writes).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from io_daemon.shared.protocol import PAGE_BYTES, align_up


class ExtentAllocator:
    """Hands out contiguous extents of ``[0, capacity_bytes)``; offsets and sizes are multiples of ``granule_bytes``.

    The owner of a file takes the extent of its header first, so offsets are offsets in the file. Also used for ids
    (``granule_bytes=1``).
    """

    def __init__(self, capacity_bytes: int, *, granule_bytes: int = PAGE_BYTES) -> None:
        if granule_bytes <= 0 or capacity_bytes < 0 or capacity_bytes % granule_bytes:
            raise ValueError(f"capacity of {capacity_bytes} bytes is not a multiple of {granule_bytes}")
        self.granule_bytes = granule_bytes
        self.capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._offsets = [0] if capacity_bytes else []
        self._lengths = [capacity_bytes] if capacity_bytes else []

    def grow(self, num_bytes: int) -> None:
        """Append free space at the end."""
        if num_bytes < 0 or num_bytes % self.granule_bytes:
            raise ValueError(f"cannot grow by {num_bytes} bytes: not a multiple of {self.granule_bytes}")
        self.capacity_bytes += num_bytes
        if num_bytes:
            self.free(self.capacity_bytes - num_bytes, num_bytes)

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a contiguous extent of ``num_bytes`` (rounded up to the granule), or None if none is left."""
        if num_bytes <= 0:
            raise ValueError(f"an extent of {num_bytes} bytes")
        num_bytes = align_up(num_bytes, self.granule_bytes)
        for index, length in enumerate(self._lengths):
            if length >= num_bytes:
                offset = self._offsets[index]
                if length == num_bytes:
                    del self._offsets[index], self._lengths[index]
                else:
                    self._offsets[index] += num_bytes
                    self._lengths[index] -= num_bytes
                self.free_bytes -= num_bytes
                return offset
        return None

    def free(self, offset: int, num_bytes: int) -> None:
        """Give an extent back. ValueError if it is out of range or overlaps free space."""
        num_bytes = align_up(num_bytes, self.granule_bytes)
        end = offset + num_bytes
        if num_bytes <= 0 or offset < 0 or offset % self.granule_bytes or end > self.capacity_bytes:
            raise ValueError(f"extent [{offset}, {end}) is outside of [0, {self.capacity_bytes})")
        index = bisect_right(self._offsets, offset)
        touches_previous = index > 0 and self._offsets[index - 1] + self._lengths[index - 1] >= offset
        if touches_previous and self._offsets[index - 1] + self._lengths[index - 1] > offset:
            raise ValueError(f"extent [{offset}, {end}) is already free")
        touches_next = index < len(self._offsets) and self._offsets[index] <= end
        if touches_next and self._offsets[index] < end:
            raise ValueError(f"extent [{offset}, {end}) is already free")
        if touches_next:
            num_bytes += self._lengths[index]
            del self._offsets[index], self._lengths[index]
        if touches_previous:
            self._lengths[index - 1] += num_bytes
        else:
            self._offsets.insert(index, offset)
            self._lengths.insert(index, num_bytes)
        self.free_bytes += end - offset

    def shortfall_bytes(self, sizes: Iterable[int]) -> int:
        """Least ``grow`` after which allocating ``sizes`` in this order succeeds. Changes nothing."""
        trial = ExtentAllocator(0, granule_bytes=self.granule_bytes)
        trial.capacity_bytes, trial.free_bytes = self.capacity_bytes, self.free_bytes
        trial._offsets, trial._lengths = list(self._offsets), list(self._lengths)
        for num_bytes in sizes:
            if trial.allocate(num_bytes) is None:
                trial.grow(align_up(num_bytes, self.granule_bytes) - trial._tail_bytes())
                trial.allocate(num_bytes)
        return trial.capacity_bytes - self.capacity_bytes

    def extents(self) -> list[tuple[int, int]]:
        """Free extents (offset, length), ascending, none touching another."""
        return list(zip(self._offsets, self._lengths, strict=True))

    def _tail_bytes(self) -> int:
        if self._offsets and self._offsets[-1] + self._lengths[-1] == self.capacity_bytes:
            return self._lengths[-1]
        return 0

"""Free space of one swap file, as coalesced extents (offset, length). Pure.

First fit. Freeing and allocating are separate, so a new version of an object can be given space before the old
version's space is returned (out-of-place writes). Every operation takes logarithmic time in the number of free extents.
"""

from __future__ import annotations

from collections.abc import Iterable

from io_daemon.policy.extent_tree import ExtentTree
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
        self._free = ExtentTree()
        if capacity_bytes:
            self._free.add(0, capacity_bytes)

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
        found = self._free.first_fit(num_bytes)
        if found is None:
            return None
        offset, length = found
        self._free.remove(offset)
        if length > num_bytes:
            self._free.add(offset + num_bytes, length - num_bytes)
        self.free_bytes -= num_bytes
        return offset

    def free(self, offset: int, num_bytes: int) -> None:
        """Give an extent back. ValueError if it is out of range or overlaps free space."""
        num_bytes = align_up(num_bytes, self.granule_bytes)
        end = offset + num_bytes
        if num_bytes <= 0 or offset < 0 or offset % self.granule_bytes or end > self.capacity_bytes:
            raise ValueError(f"extent [{offset}, {end}) is outside of [0, {self.capacity_bytes})")
        begin, before, after = offset, self._free.before(offset + 1), self._free.at_or_after(offset + 1)
        if (before is not None and sum(before) > offset) or (after is not None and after[0] < end):
            raise ValueError(f"extent [{offset}, {end}) is already free")
        self.free_bytes += num_bytes
        if before is not None and sum(before) == offset:
            begin = before[0]
            self._free.remove(begin)
        if after is not None and after[0] == end:
            end += after[1]
            self._free.remove(after[0])
        self._free.add(begin, end - begin)

    def shortfall_bytes(self, sizes: Iterable[int]) -> int:
        """Least ``grow`` after which allocating ``sizes`` in this order succeeds. Changes nothing."""
        taken: list[tuple[int, int]] = []
        capacity_bytes = self.capacity_bytes
        for num_bytes in sizes:
            offset = self.allocate(num_bytes)
            if offset is None:
                self.grow(align_up(num_bytes, self.granule_bytes) - self._tail_bytes())
                offset = self.allocate(num_bytes)
            if offset is None:
                raise AssertionError(f"no room for {num_bytes} bytes after growing by just that")
            taken.append((offset, num_bytes))
        for offset, num_bytes in taken:
            self.free(offset, num_bytes)
        grown_bytes = self.capacity_bytes - capacity_bytes
        self._cut_tail(grown_bytes)
        return grown_bytes

    def extents(self) -> list[tuple[int, int]]:
        """Free extents (offset, length), ascending, none touching another."""
        return list(self._free)

    def _cut_tail(self, num_bytes: int) -> None:
        """Take back a ``grow`` whose space is free."""
        tail = self._free.before(self.capacity_bytes)
        if num_bytes == 0 or tail is None:
            return
        self._free.remove(tail[0])
        if tail[1] > num_bytes:
            self._free.add(tail[0], tail[1] - num_bytes)
        self.capacity_bytes -= num_bytes
        self.free_bytes -= num_bytes

    def _tail_bytes(self) -> int:
        tail = self._free.before(self.capacity_bytes)
        return tail[1] if tail is not None and sum(tail) == self.capacity_bytes else 0

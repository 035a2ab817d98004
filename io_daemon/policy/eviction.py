"""The order in which resident objects that nobody holds leave. Pure."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final

from io_daemon.policy.cursor import UNKNOWN_USE
from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.states import ObjectFlags

STREAMING: Final = 1 << 59
"""This is added to the next use of what the plan does not keep: it leaves before all that is kept, farthest first."""
WORTHLESS: Final = 1 << 61
"""Stands for the next use of clean contents that will be overwritten unread."""


def rank_of(item: SwapObject, now: int) -> int:
    """How gladly ``item`` is evicted: a tick, the greater the sooner. Its next use, made nearer for a dirty object
    (evicting it costs a write besides the read), made far for what the plan does not keep."""
    if item.claims:
        return now
    dirty = item.flags & ObjectFlags.DIRTY
    if item.overwritten and not dirty:
        return WORTHLESS
    if not item.kept:
        return STREAMING + item.next_use
    if dirty and item.next_use < UNKNOWN_USE >> 1:
        return now + (item.next_use - now) * 3 // 4
    return item.next_use


class EvictionOrder:
    """The object of the highest rank on top. A heap in which an entry dies when its object's stamp moves on; the
    stamp is odd while the object is in the order."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, SwapObject]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, item: SwapObject) -> bool:
        return bool(item.stamp & 1)

    def push(self, item: SwapObject, rank: int) -> None:
        """Enter ``item``, or change its rank."""
        if item.stamp & 1:
            item.stamp += 2
        else:
            item.stamp += 1
            self._num_live += 1
        heappush(self._heap, (-rank, item.object_id, item.stamp, item))
        if len(self._heap) > 2 * self._num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].stamp]
            heapify(self._heap)

    def discard(self, item: SwapObject) -> None:
        if item.stamp & 1:
            item.stamp += 1
            self._num_live -= 1

    def pop_above(self, rank: int) -> SwapObject | None:
        """Take out the object of the highest rank, if that is above ``rank``."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].stamp:
            heappop(heap)
        if not heap or -heap[0][0] <= rank:
            return None
        item = heappop(heap)[3]
        item.stamp += 1
        self._num_live -= 1
        return item

    def rebuild(self, rank_of: Callable[[SwapObject], int]) -> None:
        """Rank every object anew."""
        live = [entry[3] for entry in self._heap if entry[2] == entry[3].stamp]
        self._heap = [(-rank_of(item), item.object_id, item.stamp, item) for item in live]
        heapify(self._heap)

    def dismantle(self) -> None:
        """Let go of all objects, one by one: in one go a large arena's would hold up all threads."""
        while self._heap:
            self._heap.pop()

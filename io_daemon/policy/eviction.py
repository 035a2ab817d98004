"""The order in which resident objects that nobody holds leave. Pure."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from io_daemon.policy.cursor import UNKNOWN_USE, Cursor
from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.states import ObjectFlags

STREAMING: Final = 1 << 59
"""This is added to the next use of what the plan does not keep: it leaves before all that is kept, farthest first."""
WORTHLESS: Final = 1 << 61
"""Stands for the next use of clean contents that will be overwritten unread."""
SLICE: Final = 1024
"""Objects ranked anew at a time: two milliseconds of the loop that all tenants share."""

_Entry = tuple[int, int, int, SwapObject]
"""Rank, negated; object id; stamp; object."""


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


def _top(heap: list[_Entry]) -> _Entry | None:
    """The first that lives; those before it go."""
    while heap and heap[0][2] != heap[0][3].stamp:
        heappop(heap)
    return heap[0] if heap else None


def _live(entries: list[_Entry]) -> list[_Entry]:
    return [entry for entry in entries if entry[2] == entry[3].stamp]


class EvictionOrder:
    """The object of the highest rank on top. A heap in which an entry dies when its object's stamp moves on; the
    stamp is odd while the object is in the order. Ranking all anew would take long where much is resident: what
    ``rank_anew`` leaves in ``_unranked`` is ranked a slice at a time, as victims are asked for. What ``pop_to_write``
    has looked at and left lies in a heap of its own, so that it is looked at once and not whenever something ends."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._heap: list[_Entry] = []
        self._passed: list[_Entry] = []
        self._passed_items: set[SwapObject] = set()
        """Those of ``_passed`` that are in the order."""
        self._passed_frames = 0
        """Frames of these."""
        self._passed_rank = WORTHLESS
        """The lowest that was passed since there was none."""
        self._unranked: list[_Entry] = []
        self._num_live = 0
        self._dirty: set[SwapObject] = set()

    def __len__(self) -> int:
        return self._num_live

    def __contains__(self, item: SwapObject) -> bool:
        return bool(item.stamp & 1)

    @property
    def has_dirty(self) -> bool:
        """Whether an object in the order has something to write."""
        return bool(self._dirty)

    def push(self, item: SwapObject) -> None:
        """Enter ``item``, or rank it anew. Whether it is dirty stays as it is while it is in the order."""
        if item.flags & ObjectFlags.DIRTY:
            self._dirty.add(item)
        if item.stamp & 1:
            item.stamp += 2
            self._forget_passed(item)
        else:
            item.stamp += 1
            self._num_live += 1
        heappush(self._heap, self._entry(item))
        if self._is_mostly_dead(self._heap):
            self._heap = _live(self._heap)
            heapify(self._heap)

    def discard(self, item: SwapObject) -> None:
        if item.stamp & 1:
            self._leave(item)

    def pop_above(self, rank: int) -> SwapObject | None:
        """Take out the object of the highest rank, if that is above ``rank``; the highest of those that have been
        ranked, while the others are not."""
        self._rank_slice()
        while not (item := self._pop_ranked(rank)) and self._unranked:
            self._rank_slice()
        return item

    def pop_to_write(self, num_frames: int, rank: int) -> SwapObject | None:
        """Take out the first object that has something to write before it leaves, if others with fewer than
        ``num_frames`` frames leave before it, and its rank is above ``rank``."""
        self._rank_slice()
        while (top := _top(self._heap)) is not None and -top[0] > rank:
            if self._passed_frames >= num_frames and -top[0] <= self._passed_rank:
                return None
            item = heappop(self._heap)[3]
            if item.flags & ObjectFlags.DIRTY and not item.overwritten:
                self._leave(item)
                return item
            self._pass(top, item)
        return None

    def rank_anew(self) -> None:
        """What objects rank by has changed."""
        self._unranked += self._heap
        self._unranked += self._passed
        self._heap, self._passed = [], []
        self._passed_items.clear()
        self._passed_frames, self._passed_rank = 0, WORTHLESS
        if self._is_mostly_dead(self._unranked):  # the plan has changed twice before all were ranked
            self._unranked = _live(self._unranked)

    def dismantle(self) -> None:
        """Let go of all objects, one by one: in one go a large arena's would hold up all threads."""
        for entries in (self._heap, self._passed, self._unranked):
            while entries:
                entries.pop()
        for items in (self._dirty, self._passed_items):
            while items:
                items.pop()

    def _is_mostly_dead(self, entries: list[_Entry]) -> bool:
        return len(entries) > 2 * self._num_live + 64

    def _entry(self, item: SwapObject) -> _Entry:
        self._cursor.refresh(item)
        return -rank_of(item, self._cursor.tick), item.object_id, item.stamp, item

    def _pop_ranked(self, rank: int) -> SwapObject | None:
        while (heap := self._heap_of_top()) and -heap[0][0] > rank:
            item = heap[0][3]
            if item.claims and -heap[0][0] > self._cursor.tick:
                self.push(item)  # since it was ranked somebody has asked for it
                continue
            heappop(heap)
            self._leave(item)
            return item
        return None

    def _heap_of_top(self) -> list[_Entry] | None:
        """The one that has the object of the highest rank on top; None where neither has any."""
        top, passed = _top(self._heap), _top(self._passed)
        if passed is not None and (top is None or passed < top):
            return self._passed
        return None if top is None else self._heap

    def _pass(self, entry: _Entry, item: SwapObject) -> None:
        """``pop_to_write`` leaves the object where it is."""
        if self._is_mostly_dead(self._passed):
            self._passed = _live(self._passed)
            heapify(self._passed)
        heappush(self._passed, entry)
        self._passed_items.add(item)
        self._passed_frames += item.num_frames
        self._passed_rank = min(self._passed_rank, -entry[0])

    def _forget_passed(self, item: SwapObject) -> None:
        if item in self._passed_items:
            self._passed_items.discard(item)
            self._passed_frames -= item.num_frames
            if not self._passed_items:
                self._passed_rank = WORTHLESS

    def _leave(self, item: SwapObject) -> None:
        item.stamp += 1
        self._num_live -= 1
        self._dirty.discard(item)
        self._forget_passed(item)

    def _rank_slice(self) -> None:
        taken, self._unranked[-SLICE:] = self._unranked[-SLICE:], ()
        for entry in taken:
            if entry[2] == entry[3].stamp:
                heappush(self._heap, self._entry(entry[3]))

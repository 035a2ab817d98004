"""Who should be resident: next uses from a trace, the place in it, and the order of eviction. Pure.

Belady's MIN: when frames are short, evict what is used farthest in the future. ``plan`` turns a trace into next-use
tables; it is a pure function of picklable data, so it can run in a process of its own. ``Cursor`` follows the pass
on a line of *ticks* (one per traced access, never reset) and predicts each object's next use; ``EvictionOrder`` keeps
the candidates sorted by that prediction. Predictions are advisory: a wrong one costs I/O, never contents.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from io_daemon.catalog import SwapObject
from io_daemon.protocol import KINDS_MAX
from io_daemon.states import ObjectFlags
from io_daemon.trace import Trace

RESYNC_LOOK_AHEAD: Final = 16
"""Accesses that may have been left out before the one that came."""
STRAYS_MAX: Final = 8
"""Accesses in a row that fit nowhere near before the cursor moves to the next occurrence, however far."""
UNKNOWN_USE: Final = 1 << 60
"""Next use of an object about which nothing is known, less its last use: such objects leave before all others,
least recently used first."""
NO_USE: Final = 1 << 61
"""Next use of contents that will be overwritten unread."""
UNPLANNED: Final = -1

_BORN, _DIRTY = ObjectFlags.BORN, ObjectFlags.DIRTY


@dataclass(frozen=True, eq=False)
class Plan:
    """Next uses over one trace of L accesses. Object id = chunk * KINDS_MAX + kind."""

    chunk: NDArray[np.uint32]
    read_mask: NDArray[np.uint8]
    write_mask: NDArray[np.uint8]
    reuse: NDArray[np.uint32]
    """[L * KINDS_MAX], at position * KINDS_MAX + kind: accesses until that object's next one (1 to L, cyclic) times
    two, plus one if that next access is write-only. 0 where the access does not touch the kind."""
    first_use: NDArray[np.int64]
    """[object ids + 1]: the uses of object i are positions[first_use[i] : first_use[i + 1]]."""
    positions: NDArray[np.int64]
    """Positions in the trace, ascending for each object."""
    write_only: NDArray[np.uint8]
    """Parallel to ``positions``."""

    def __len__(self) -> int:
        return len(self.chunk)


def plan(trace: Trace) -> Plan:
    """Next-use tables of a (validated) trace: O(n log n) in the objects accessed, a few dozen bytes each."""
    num_accesses = len(trace)
    touched = trace.read_mask | trace.write_mask
    bits = np.unpackbits(touched[:, None], axis=1, bitorder="little")
    position, kind = np.nonzero(bits)
    object_id = trace.chunk[position].astype(np.int64) * KINDS_MAX + kind
    write_only = (trace.read_mask[position] >> kind.astype(np.uint8) & 1) == 0
    order = np.argsort(object_id, kind="stable")
    object_id, position, kind, write_only = object_id[order], position[order], kind[order], write_only[order]

    counts = np.bincount(object_id)
    first_use = np.concatenate(([0], np.cumsum(counts)))
    following = np.arange(1, len(object_id) + 1)
    last = first_use[1:][counts > 0] - 1
    following[last] = first_use[:-1][counts > 0]
    distance = position[following] - position
    distance[last] += num_accesses
    reuse = np.zeros(num_accesses * KINDS_MAX, dtype=np.uint32)
    reuse[position * KINDS_MAX + kind] = distance * 2 + write_only[following]
    return Plan(
        chunk=trace.chunk,
        read_mask=trace.read_mask,
        write_mask=trace.write_mask,
        reuse=reuse,
        first_use=first_use,
        positions=position,
        write_only=write_only.astype(np.uint8),
    )


class _PlanView:
    """A plan's arrays as memoryviews: indexing one element costs a fraction of what numpy asks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.length = len(plan)
        self.num_objects = len(plan.first_use) - 1
        self.chunk: memoryview[int] = plan.chunk.data
        self.read: memoryview[int] = plan.read_mask.data
        self.write: memoryview[int] = plan.write_mask.data
        self.reuse: memoryview[int] = plan.reuse.data
        self.first_use: memoryview[int] = plan.first_use.data
        self.positions: memoryview[int] = plan.positions.data
        self.write_only: memoryview[int] = plan.write_only.data


class Cursor:
    """The place in the trace. ``tick`` counts accesses; the access expected next has the tick ``tick``.

    Without a plan, or for an access that is not in it, the next use is guessed from the last reuse distance, and an
    object seen once only is taken to be of no further use for now.
    """

    def __init__(self) -> None:
        self.tick = 0
        self.epoch = 0
        """Grows whenever earlier predictions lose their meaning."""
        self._origin = 0
        self._strays = 0
        self._view: _PlanView | None = None

    @property
    def plan(self) -> Plan | None:
        return self._view.plan if self._view is not None else None

    def start_pass(self, plan: Plan | None) -> bool:
        """Position 0 of ``plan`` is now. False if that is what was expected, so that all predictions still hold."""
        self._strays = 0
        if self._view is not None and plan is self._view.plan and (self.tick - self._origin) % self._view.length == 0:
            return False
        self._view = None if plan is None else _PlanView(plan)
        self._origin = self.tick
        self.epoch += 1
        return True

    def access_at(self, tick: int) -> tuple[int, int, int]:
        """(chunk, read_mask, write_mask) that the plan expects at ``tick``; there must be a plan."""
        view = self._view
        if view is None:
            raise AssertionError("access_at without a plan")
        position = (tick - self._origin) % view.length
        return view.chunk[position], view.read[position], view.write[position]

    def advance(self, chunk: int, read_mask: int, write_mask: int) -> int:
        """An access came: its tick, or UNPLANNED. A few left-out accesses are skipped; a stray one leaves the cursor
        where it is; after STRAYS_MAX strays the cursor goes to the next occurrence."""
        view = self._view
        if view is None:
            self.tick += 1
            return UNPLANNED
        tick = self.tick
        for ahead in range(min(RESYNC_LOOK_AHEAD, view.length)):
            here = (tick + ahead - self._origin) % view.length
            if view.chunk[here] == chunk and view.read[here] == read_mask and view.write[here] == write_mask:
                self._strays = 0
                self.tick = tick + ahead + 1
                return tick + ahead
        self._strays += 1
        if self._strays >= STRAYS_MAX:
            self._strays = 0
            found = self._next_occurrence(view, chunk, read_mask, write_mask)
            if found >= 0:
                self.tick = found + 1
                return found
        return UNPLANNED

    def predict(self, item: SwapObject, tick: int) -> None:
        """``item`` is being used at ``tick`` (or UNPLANNED): set its next use."""
        view = self._view
        if view is not None and tick >= 0:
            reuse = view.reuse[(tick - self._origin) % view.length * KINDS_MAX + item.kind]
            item.next_use, item.overwritten = tick + (reuse >> 1), bool(reuse & 1)
            item.epoch = self.epoch
        elif view is not None:
            self._look_up(view, item)
        else:
            distance = self.tick - item.last_use
            item.next_use = self.tick + distance if item.last_use >= 0 else UNKNOWN_USE - self.tick
            item.overwritten = False
            item.epoch = self.epoch
        item.last_use = self.tick

    def refresh(self, item: SwapObject) -> None:
        """Renew a prediction that a new pass or a skipped access has overtaken."""
        if item.epoch == self.epoch and item.next_use >= self.tick:
            return
        if self._view is not None:
            self._look_up(self._view, item)
        elif item.next_use < self.tick:
            item.next_use, item.overwritten = UNKNOWN_USE - item.last_use, False
            item.epoch = self.epoch

    def _look_up(self, view: _PlanView, item: SwapObject) -> None:
        """First use of ``item`` in the plan at or after the cursor."""
        item.epoch = self.epoch
        begin = end = 0
        if item.object_id < view.num_objects:
            begin, end = view.first_use[item.object_id], view.first_use[item.object_id + 1]
        if begin == end:
            item.next_use, item.overwritten = UNKNOWN_USE - item.last_use, False
            return
        here = (self.tick - self._origin) % view.length
        index = bisect_left(view.positions, here, begin, end)
        wrapped = index == end
        if wrapped:
            index = begin
        item.next_use = self.tick + view.positions[index] - here + (view.length if wrapped else 0)
        item.overwritten = bool(view.write_only[index])

    def _next_occurrence(self, view: _PlanView, chunk: int, read_mask: int, write_mask: int) -> int:
        """Tick at which the plan has this access next, or UNPLANNED."""
        mask = read_mask | write_mask
        object_id = chunk * KINDS_MAX + (mask & -mask).bit_length() - 1
        if object_id >= view.num_objects:
            return UNPLANNED
        begin, end = view.first_use[object_id], view.first_use[object_id + 1]
        here = (self.tick - self._origin) % view.length
        split = bisect_left(view.positions, here, begin, end)
        for index in (*range(split, end), *range(begin, split)):
            position = view.positions[index]
            if view.read[position] == read_mask and view.write[position] == write_mask:
                return int(self.tick + (position - here) % view.length)
        return UNPLANNED


class EvictionOrder:
    """Resident objects that nobody holds, the one to evict first on top. A heap in which an entry dies when its
    object's stamp moves on."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, SwapObject]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, item: SwapObject, use: int) -> None:
        """Enter ``item`` with the next use by which it is judged, or change that."""
        if item.stamp & 1:
            item.stamp += 2
        else:
            item.stamp += 1
            self._num_live += 1
        heappush(self._heap, (-use, item.object_id, item.stamp, item))
        if len(self._heap) > 2 * self._num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].stamp]
            heapify(self._heap)

    def discard(self, item: SwapObject) -> None:
        if item.stamp & 1:
            item.stamp += 1
            self._num_live -= 1

    def pop_farther(self, tick: int) -> SwapObject | None:
        """Take out the object used farthest in the future, if that is after ``tick``."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].stamp:
            heappop(heap)
        if not heap or -heap[0][0] <= tick:
            return None
        item = heappop(heap)[3]
        item.stamp += 1
        self._num_live -= 1
        return item

    def rebuild(self, use_of: Callable[[SwapObject], int]) -> None:
        """Judge every object anew."""
        live = [entry[3] for entry in self._heap if entry[2] == entry[3].stamp]
        self._heap = [(-use_of(item), item.object_id, item.stamp, item) for item in live]
        heapify(self._heap)


def eviction_use(item: SwapObject, now: int) -> int:
    """The tick by which an evictable object is judged: its next use, made nearer for a dirty one (evicting it costs
    a write besides the read), made endless for contents that will be overwritten unread."""
    if item.leases:
        return now
    if not item.flags & _DIRTY:
        return NO_USE if item.overwritten else item.next_use
    if item.next_use >= UNKNOWN_USE >> 1:
        return item.next_use
    return now + (item.next_use - now) * 3 // 4

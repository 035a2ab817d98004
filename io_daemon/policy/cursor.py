"""The place in a trace, and the next use of every object as seen from there. Pure.

Accesses are counted on a line of *ticks* that is never reset. Without a plan, or for an access that is not in it, the
next use is guessed from the last reuse distance; an object seen once only is taken to be of no further use for now.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import numpy as np

from io_daemon.policy.residency import Plan
from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.protocol import KINDS_MAX

RESYNC_LOOK_AHEAD: Final = 16
"""Accesses that may have been left out before the one that came."""
STRAYS_MAX: Final = 8
"""Accesses in a row that fit nowhere near before the cursor moves to the next occurrence, however far."""
UNKNOWN_USE: Final = 1 << 60
"""Next use of an object about which nothing is known, less its last use: such objects leave before those with a
known use, least recently used first."""
UNPLANNED: Final = -1


class _PlanView:
    """A plan's arrays as memoryviews: indexing one element costs a fraction of what numpy asks."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.length = len(plan)
        self.num_objects = len(plan.first_use) - 1
        self.chunk: memoryview[int] = plan.chunk.data
        self.read: memoryview[int] = plan.read_mask.data
        self.write: memoryview[int] = plan.write_mask.data
        self.use_at: memoryview[int] = plan.use_at.data
        self.first_use: memoryview[int] = plan.first_use.data
        self.position: memoryview[int] = plan.position.data
        self.distance: memoryview[int] = plan.distance.data
        self.write_only: memoryview[int] = plan.write_only.view(np.uint8).data
        self.next_write_only: memoryview[int] = plan.next_write_only.view(np.uint8).data
        self.kept: memoryview[int] = plan.kept.view(np.uint8).data


class Cursor:
    """``tick`` counts accesses; the access expected next has the tick ``tick``."""

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
        """``item`` is being used at ``tick`` (or UNPLANNED): set what comes after."""
        view = self._view
        if view is None:
            distance = self.tick - item.last_use
            item.next_use = self.tick + distance if item.last_use >= 0 else UNKNOWN_USE - self.tick
            item.overwritten, item.kept = False, True
            item.epoch = self.epoch
        elif tick >= 0:
            use = view.use_at[(tick - self._origin) % view.length * KINDS_MAX + item.kind]
            item.next_use = tick + view.distance[use]
            item.overwritten, item.kept = bool(view.next_write_only[use]), bool(view.kept[use])
            item.epoch = self.epoch
        else:
            self._look_up(view, item)
        item.last_use = self.tick

    def refresh(self, item: SwapObject) -> None:
        """Renew a prediction that a new pass or a skipped access has overtaken."""
        if item.epoch == self.epoch and item.next_use >= self.tick:
            return
        if self._view is not None:
            self._look_up(self._view, item)
        elif item.next_use < self.tick:
            self._forget(item)

    def _look_up(self, view: _PlanView, item: SwapObject) -> None:
        """First use of ``item`` in the plan at or after the cursor."""
        begin = end = 0
        if item.object_id < view.num_objects:
            begin, end = view.first_use[item.object_id], view.first_use[item.object_id + 1]
        if begin == end:
            self._forget(item)
            return
        here = (self.tick - self._origin) % view.length
        use = bisect_left(view.position, here, begin, end)
        previous = (end if use == begin else use) - 1
        if use == end:
            use = begin
        item.next_use = self.tick + (view.position[use] - here) % view.length
        item.overwritten, item.kept = bool(view.write_only[use]), bool(view.kept[previous])
        item.epoch = self.epoch

    def _forget(self, item: SwapObject) -> None:
        """Nothing is known of the object's future."""
        item.next_use = UNKNOWN_USE - item.last_use
        item.overwritten, item.kept = False, True
        item.epoch = self.epoch

    def _next_occurrence(self, view: _PlanView, chunk: int, read_mask: int, write_mask: int) -> int:
        """Tick at which the plan has this access next, or UNPLANNED."""
        mask = read_mask | write_mask
        object_id = chunk * KINDS_MAX + (mask & -mask).bit_length() - 1
        if object_id >= view.num_objects:
            return UNPLANNED
        begin, end = view.first_use[object_id], view.first_use[object_id + 1]
        here = (self.tick - self._origin) % view.length
        split = bisect_left(view.position, here, begin, end)
        for use in (*range(split, end), *range(begin, split)):
            position = view.position[use]
            if view.read[position] == read_mask and view.write[position] == write_mask:
                return int(self.tick + (position - here) % view.length)
        return UNPLANNED

"""What of one tenant is resident: gives out frames, evicts, prefetches, writes behind. Pure.

Frames are looked for in three ways, most urgent first:

- ``reclaim``: a lease is short of frames. Whatever nobody holds may go, the farthest next use first.
- ``look_ahead``: walks the trace from the cursor, within a window of frames, and readies each access: swaps in what
  will be read, keeps frames free for what will only be written. It evicts only what is used later than what it
  readies.
- ``write_behind``: cleans the next victims, so that a lease rarely waits for a write.

Contents are given up only on the rank's word (a dead release, a dirty release of newer contents), never because the
trace says that they will be overwritten: that only lowers what they are worth keeping or writing early for.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from io_daemon.policy.actions import Hurry, StartIo, TableWriter
from io_daemon.policy.catalog import KINDS_OF, Catalog, Chunk
from io_daemon.policy.counters import Counters
from io_daemon.policy.cursor import Cursor
from io_daemon.policy.eviction import STREAMING, EvictionOrder
from io_daemon.policy.leases import Lease
from io_daemon.policy.residency import Plan
from io_daemon.policy.swap_object import SwapObject
from io_daemon.policy.transfers import Transfer, Transfers
from io_daemon.shared.protocol import IoEnd
from io_daemon.shared.states import ObjectFlags, ObjectState

DIRTY_PASSED_MAX: Final = 64
"""So many dirty objects are passed over in one search for frames: bounds its time, as writes are under way already."""
LOOK_AHEAD_STEPS_MAX: Final = 32
"""Accesses examined in one event: bounds the event's time."""

_ABSENT, _RESIDENT, _SWAPPING_IN = ObjectState.ABSENT, ObjectState.RESIDENT, ObjectState.SWAPPING_IN
_BORN, _DIRTY, _PINNED = ObjectFlags.BORN, ObjectFlags.DIRTY, ObjectFlags.PINNED
_UNFILLED, _DYING, _PREFETCHED = ObjectFlags.UNFILLED, ObjectFlags.DYING, ObjectFlags.PREFETCHED


class HostTier:
    def __init__(
        self, catalog: Catalog, block_bytes: int, table: TableWriter, *, verify: bool, in_flight_frames_max: int
    ) -> None:
        self.counters = Counters()
        self._transfers = Transfers(catalog.num_frames, catalog.frame_bytes, block_bytes, table, verify=verify)
        self._working_ahead = True
        """Prefetch and write-behind are on."""
        self._catalog = catalog
        self._cursor = Cursor()
        self._order = EvictionOrder(self._cursor)
        self._window_frames = in_flight_frames_max
        self._pointer = 0
        """Tick of the next access to ready; those from the cursor to here have been."""
        self._readied: deque[tuple[int, int, int]] = deque()
        """(tick, frames readied, those of them kept free) of accesses between cursor and pointer that needed any."""
        self._readied_frames = 0
        self._kept_free_frames = 0
        self._short_at = -1
        """Tick at which frames were last short, so that something had to leave."""

    # The pass and its predictions.

    def start_pass(self, plan: Plan | None) -> None:
        """The next access is the first of ``plan`` (None: of an unknown order)."""
        if self._cursor.start_pass(plan):
            self._pointer = self._cursor.tick
            self._readied.clear()
            self._readied_frames = self._kept_free_frames = 0
            self._order.rank_anew()

    @property
    def plan(self) -> Plan | None:
        """The plan that is followed now."""
        return self._cursor.plan

    def note_access(self, lease: Lease) -> None:
        """A lease was asked for: move the cursor, predict next uses, count hits."""
        cursor = self._cursor
        tick = cursor.advance(lease.chunk.chunk_id, lease.read_mask, lease.write_mask)
        counters = self.counters
        for item in lease.objects:
            if lease.read_mask >> item.kind & 1 and not item.flags & _BORN:
                if item.flags & _PREFETCHED:
                    counters.prefetch_hits += 1
                elif item.state is _ABSENT:
                    counters.misses += 1
                else:
                    counters.hits += 1
            item.note_use()
            cursor.predict(item, tick)
        while self._readied and self._readied[0][0] < cursor.tick:
            _, num_frames, num_kept_free = self._readied.popleft()
            self._readied_frames -= num_frames
            self._kept_free_frames -= num_kept_free

    # What is there, and what it came to.

    @property
    def free_frames(self) -> int:
        return len(self._transfers.free_frames)

    @property
    def resident_bytes(self) -> list[int]:
        """Bytes of the objects that have frames, by ObjectKind."""
        return list(self._transfers.resident_bytes)

    @property
    def idle(self) -> bool:
        """No I/O is in flight."""
        return self._transfers.num_in_flight == 0

    def admit(self, chunk: Chunk) -> None:
        """A chunk was registered."""
        for item in chunk.present():
            self._transfers.store(item)

    def retire(self, chunk: Chunk) -> bool:
        """The chunk was unregistered: free what is in no I/O. True when nothing of it is left."""
        items = chunk.present()
        for item in items:
            self._order.discard(item)
            if item.state is _RESIDENT:
                self._transfers.drop(item)
        if any(item.state is not _ABSENT for item in items):
            return False
        for item in items:
            self._transfers.erase(item)
        return True

    # Leases.

    def hold(self, item: SwapObject) -> bool:
        """Take hold of an object's frames for a lease, assigning free ones if it has none. False: too few are free."""
        if item.state is _ABSENT:
            if self.free_frames < item.num_frames:
                return False
            self._transfers.assign(item)
        self._order.discard(item)
        self._transfers.hold(item)
        return True

    def let_go(self, item: SwapObject) -> None:
        """A lease that held the object's frames is over; ``settle`` follows."""
        self._transfers.let_go(item)

    def reclaim(self, num_frames: int) -> bool:
        """Make ``num_frames`` free for a lease. True if they are free now, False: when writes in flight have ended."""
        if self._make_room(num_frames, after=-1, demand=True):
            return True
        if self._transfers.frames_idle_out:
            self._transfers.hurry()
        return False

    def fill(self, item: SwapObject) -> None:
        """A lease waits for the contents."""
        self._transfers.swap_in(item, demand=True)

    def hurry_out(self) -> None:
        """A lease waits for the end of the swap-out of an object that it holds."""
        self._transfers.hurry()

    def lend(self, item: SwapObject, seq: int, *, reads: bool, writes: bool) -> None:
        """Lease ``seq`` is granted: from now on the rank looks at the frames."""
        if not writes:
            item.num_readers += 1
        else:
            item.num_writers += 1
            if not reads:
                item.hand_over_unread()
        item.lease_seq = seq
        self._transfers.store(item)

    def take_back(self, item: SwapObject, *, writes: bool, dirty: int, dead: int) -> None:
        """The rank looks at the frames no more; ``settle`` follows."""
        if writes:
            item.num_writers -= 1
        else:
            item.num_readers -= 1
        if dirty:
            item.note_written()
        if dead:
            item.doom()

    def settle(self, item: SwapObject) -> None:
        """A lease on the object or its I/O has ended: bury what is dead, let rest what nobody holds."""
        if item.state is _RESIDENT:
            if item.flags & _DYING and not item.num_readers and not item.num_writers:
                item.bury()
            if item.holds == 0:
                self._rest(item)
        self._transfers.store(item)

    # I/O.

    def take_started(self) -> list[StartIo | Hurry]:
        """I/O decided upon since the last call."""
        started, self._transfers.started = self._transfers.started, []
        return started

    def finish(self, io_id: int, end: IoEnd) -> Transfer | None:
        """One piece ended: its transfer, if this was the last piece. KeyError if no such piece is in flight."""
        transfer = self._transfers.finish(io_id, end)
        if transfer is not None:
            moved = self.counters.bytes_written if transfer.write else self.counters.bytes_read
            moved[transfer.item.kind] += transfer.moved_bytes
            if transfer.failure is not None:
                self.counters.io_errors += 1
        return transfer

    def work_ahead(self, *, prefetch: bool) -> None:
        """Write behind; prefetch, unless a lease is short of frames."""
        if not self._working_ahead:
            return
        if prefetch:
            self._look_ahead()
        if self._order.has_dirty:
            self._write_behind()

    def stop_working_ahead(self) -> None:
        """Move nothing any more but what leases ask for."""
        self._working_ahead = False

    def dismantle(self) -> None:
        """Let go of all objects, when nothing is asked of them any more."""
        self._order.dismantle()

    # Private.

    def _rest(self, item: SwapObject) -> None:
        """Nobody holds a RESIDENT object: evictable from now on, or dropped at once if its frames hold nothing."""
        if item.flags & _PINNED:
            return
        if item.flags & _UNFILLED:
            self._transfers.drop(item)
        else:
            self._order.push(item)

    def _make_room(self, num_frames: int, *, after: int, demand: bool) -> bool:
        """Evict what is used after tick ``after`` until ``num_frames`` are free, or will be when writes end.

        While enough writes are in flight, what is dirty is passed over for clean objects that only stream by.
        """
        if self.free_frames >= num_frames:
            return True
        self._short_at = self._cursor.tick
        passed_over: list[SwapObject] = []
        above, dirty_left = after, DIRTY_PASSED_MAX
        while self.free_frames < num_frames and dirty_left and (victim := self._order.pop_above(above)) is not None:
            if victim.next_use <= after:
                passed_over.append(victim)  # it is to be overwritten, but it needs its frames before these are needed
            elif not victim.flags & _DIRTY:
                self._drop(victim)
            elif self.free_frames + self._transfers.frames_idle_out < num_frames:
                self._transfers.swap_out(victim, demand=demand)
            else:
                passed_over.append(victim)
                dirty_left -= 1
                above = STREAMING + max(after, self._pointer)
        for item in passed_over:
            self._rest(item)
        return self.free_frames >= num_frames

    def _drop(self, item: SwapObject) -> None:
        self.counters.evictions += 1
        self._transfers.drop(item)

    def _look_ahead(self) -> None:
        cursor = self._cursor
        plan = cursor.plan
        if plan is None:
            return
        self._pointer = max(self._pointer, cursor.tick)
        stop = min(cursor.tick + len(plan), self._pointer + LOOK_AHEAD_STEPS_MAX)
        while self._pointer < stop and self._ready(self._pointer):
            self._pointer += 1

    def _ready(self, tick: int) -> bool:
        """Make the access at ``tick`` ready, or as nearly as frames allow: False if it must be tried again."""
        chunk_id, read_mask, write_mask = self._cursor.access_at(tick)
        fills: list[SwapObject] = []
        num_frames = num_kept_free = 0
        for item in self._objects_due(chunk_id, read_mask | write_mask, tick):
            num_frames += item.num_frames
            if read_mask >> item.kind & 1 and not item.flags & _BORN:
                fills.append(item)
            else:
                num_kept_free += item.num_frames
        if num_frames == 0:
            return True
        if self._readied and self._readied_frames + num_frames > self._window_frames:
            return False
        if not self._make_room(self._kept_free_frames + num_frames, after=tick, demand=False):
            return False
        for item in fills:
            self._transfers.assign(item)
            self._transfers.swap_in(item, demand=False)
        self._readied.append((tick, num_frames, num_kept_free))
        self._readied_frames += num_frames
        self._kept_free_frames += num_kept_free
        return True

    def _objects_due(self, chunk_id: int, mask: int, tick: int) -> list[SwapObject]:
        """Objects of an access that have no frames and whose next use it is."""
        due: list[SwapObject] = []
        chunk = self._catalog.chunks[chunk_id]
        for kind in KINDS_OF[mask]:
            item = chunk.objects[kind]
            if item is not None and item.state is _ABSENT:
                self._cursor.refresh(item)
                if item.next_use == tick:
                    due.append(item)
        return due

    def _write_behind(self) -> None:
        """Clean what will leave next, until a window's and a largest lease's worth of frames is free, clean or being
        written. With a plan that knows what it keeps, only what it does not; without one, only while frames are short:
        what is used fits if nothing had to leave in as many accesses as there are frames, and stays unwritten."""
        pool = self._window_frames + self._catalog.demand_frames_max
        after = -1
        if (plan := self._cursor.plan) is not None:
            after = STREAMING if plan.selective else self._pointer
        else:
            pool = min(pool, self._catalog.usable_frames // 2)
        chosen = plan is not None and plan.selective
        if not chosen and not 0 <= self._short_at >= self._cursor.tick - self._catalog.usable_frames:
            return
        while (missing := pool - self.free_frames - self._transfers.frames_idle_out) > 0:
            if (item := self._order.pop_to_write(missing, after)) is None:
                return
            self._transfers.swap_out(item, demand=False)

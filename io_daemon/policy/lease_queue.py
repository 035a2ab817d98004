"""The leases of one tenant that are outstanding: in what order they get frames, and when each is granted. Pure.

**Who may have a lease when.** Leases on one object are granted in order of issue, except that readers share it: a
lease waits for every earlier outstanding lease on the object if either of the two writes. A write lease also waits
for the end of a swap-out of its object (the kernel is reading those bytes); a read lease does not.

**Who gets frames when.** Leases take hold of frames in order of issue. The one at the head of the queue takes what
is free as it comes; nobody behind it takes a free frame. A lease whose objects are all resident may overtake, as long
as the frames held by overtakers leave enough for the largest lease that waits.

**Why nothing waits for ever.** Let H be the head of the queue. Frames that it cannot have are held by leases issued
before H, by overtakers, or by I/O. I/O ends. Overtakers leave H's demand untouched. An earlier lease is either
granted, and then its rank can finish with it, or it holds all its frames and waits for I/O or for leases issued
before itself: by induction it is granted. Registering refuses chunks whose demand set and all pinned frames
together exceed the arena, so that is enough. What a rank must not do is wait for a later lease while it keeps an
earlier one that stands in the later one's way.
"""

from __future__ import annotations

from collections import deque

from io_daemon.policy.catalog import Catalog
from io_daemon.policy.host_tier import HostTier
from io_daemon.policy.leases import Lease, LeaseState
from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.protocol import Cqe, Status
from io_daemon.shared.states import ObjectFlags, ObjectState

_ABSENT, _RESIDENT, _SWAPPING_OUT = ObjectState.ABSENT, ObjectState.RESIDENT, ObjectState.SWAPPING_OUT
_BORN, _DYING, _UNFILLED = ObjectFlags.BORN, ObjectFlags.DYING, ObjectFlags.UNFILLED
_QUEUED, _HELD, _GRANTED, _GONE = LeaseState.QUEUED, LeaseState.HELD, LeaseState.GRANTED, LeaseState.GONE


class LeaseQueue:
    def __init__(self, catalog: Catalog, tier: HostTier) -> None:
        self._catalog, self._tier = catalog, tier
        self._outstanding: dict[int, Lease] = {}
        self._queue: deque[Lease] = deque()
        """Those short of frames, in order of issue."""
        self._overtaken_frames = 0
        """What those hold together that were given frames before earlier ones."""
        self._granted: list[Cqe] = []

    def __len__(self) -> int:
        """Leases that are outstanding: queued, held or granted."""
        return len(self._outstanding)

    def get(self, seq: int) -> Lease | None:
        return self._outstanding.get(seq)

    def outstanding(self, seq: int) -> Lease:
        """KeyError if it is not."""
        return self._outstanding[seq]

    def waiting(self) -> list[Lease]:
        """Those short of frames."""
        return list(self._queue)

    @property
    def are_short_of_frames(self) -> bool:
        return bool(self._queue)

    def take_granted(self) -> list[Cqe]:
        """The answers of leases granted since the last call."""
        granted, self._granted = self._granted, []
        return granted

    def ask(self, lease: Lease) -> None:
        """A lease was asked for."""
        self._outstanding[lease.seq] = lease
        for item in lease.objects:
            item.claims[lease.seq] = bool(lease.write_mask >> item.kind & 1)
        self._tier.note_access(lease)
        if self._queue and self._may_overtake(lease):
            lease.overtook = True
            self._overtaken_frames += lease.num_frames
            self._take_frames(lease)
            self._advance(lease)
            return
        self._queue.append(lease)
        self.serve()
        if lease.state is _QUEUED:
            self._tier.counters.waits += 1

    def serve(self) -> None:
        while self._queue:
            lease = self._queue[0]
            complete = self._take_frames(lease)
            if complete:
                self._queue.popleft()
            self._advance(lease)
            if not complete:
                return

    def _may_overtake(self, lease: Lease) -> bool:
        for item in lease.objects:
            if item.state is _ABSENT or lease.blocked_on(item):
                return False
        largest = max(waiting.num_frames for waiting in self._queue)
        return self._overtaken_frames + lease.num_frames + largest <= self._catalog.usable_frames

    def _take_frames(self, lease: Lease) -> bool:
        """Hold the objects that have frames, or for which enough are free; make room for the others. True: all."""
        while True:
            missing_frames = 0
            for item in lease.objects:
                bit = 1 << item.kind
                if lease.held_mask & bit:
                    continue
                if self._tier.hold(item):
                    lease.held_mask |= bit
                else:
                    missing_frames += item.num_frames
            if missing_frames == 0:
                lease.state = _HELD
                return True
            if not self._tier.reclaim(missing_frames):
                return False

    def _advance(self, lease: Lease) -> None:
        """Start every swap-in that the lease can use now; grant it if nothing is left to wait for."""
        ready = lease.state is _HELD
        for item in lease.objects:
            bit = 1 << item.kind
            if not lease.held_mask & bit or lease.blocked_on(item):
                ready = False
            elif item.state is _SWAPPING_OUT:
                if lease.write_mask & bit or item.flags & _DYING:
                    self._tier.hurry_out()
                    ready = False
            elif item.state is not _RESIDENT or item.flags & _DYING:
                ready = False
            elif lease.read_mask & bit and item.flags & _UNFILLED and not item.flags & _BORN:
                self._tier.fill(item)
                ready = False
        if ready:
            self._grant(lease)

    def _grant(self, lease: Lease) -> None:
        lease.state = _GRANTED
        born_mask = 0
        for item in lease.objects:
            bit = 1 << item.kind
            if lease.read_mask & bit and item.flags & _BORN:
                born_mask |= bit
            self._tier.lend(item, lease.seq, reads=bool(lease.read_mask & bit), writes=bool(lease.write_mask & bit))
        self._granted.append(Cqe(lease.seq, Status.OK, chunk=lease.chunk.chunk_id, born_mask=born_mask))

    def end(self, lease: Lease, dirty_mask: int = 0, dead_mask: int = 0) -> None:
        """The lease is over. Its objects are to be settled next."""
        if lease.state is _QUEUED:
            self._queue.remove(lease)
        granted = lease.state is _GRANTED
        lease.state = _GONE
        del self._outstanding[lease.seq]
        if lease.overtook:
            self._overtaken_frames -= lease.num_frames
        for item in lease.objects:
            bit = 1 << item.kind
            del item.claims[lease.seq]
            if lease.held_mask & bit:
                self._tier.let_go(item)
            if granted:
                writes = bool(lease.write_mask & bit)
                self._tier.take_back(item, writes=writes, dirty=dirty_mask & bit, dead=dead_mask & bit)

    def settle(self, item: SwapObject) -> None:
        """A lease on the object or its I/O has ended: see who can go on."""
        self._tier.settle(item)
        for seq in tuple(item.claims):
            lease = self._outstanding[seq]
            if lease.state is not _GRANTED:
                self._advance(lease)

    def dismantle(self) -> None:
        """Forget all leases; nothing is asked of them any more."""
        self._outstanding.clear()
        self._queue.clear()

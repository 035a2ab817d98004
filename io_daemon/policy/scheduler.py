"""The policy of one tenant: submission entries and I/O completions in, actions out. Pure: no I/O, clock or threads.

Who may have a lease when, and who gets frames when, is decided in ``lease_queue``.

**What a release means.** Dirty kinds are the new contents. Dead kinds have none any more: they are born again (dead
wins over dirty). Write-only kinds that are not dirty go back to what they were: to the version on disk if there is
one; else the rank's word that it wrote nothing is taken, because the frames were the only copy. Releasing a lease
that was not granted cancels it; it gets no CQE. Releasing one that was answered with an error is accepted in silence,
because the two may cross on the rings.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence, Set
from typing import Final

import numpy as np

from io_daemon.policy.actions import Action, TableWriter
from io_daemon.policy.catalog import Catalog, Chunk
from io_daemon.policy.counters import Counters
from io_daemon.policy.extents import ExtentAllocator
from io_daemon.policy.host_tier import HostTier
from io_daemon.policy.lease_queue import LeaseQueue
from io_daemon.policy.leases import Lease, LeaseState
from io_daemon.policy.residency import Plan, PlanRequest
from io_daemon.policy.trace import Geometry, Trace
from io_daemon.policy.transfers import Transfer
from io_daemon.policy.window import frames_to_plan
from io_daemon.shared.protocol import LEASES_MAX, Access, ChunkSpec, Cqe, IoEnd, Opcode, Sqe, Status
from io_daemon.shared.states import ObjectFlags

TRACES_MAX: Final = 16

_PINNED = ObjectFlags.PINNED


class TenantScheduler:
    """Decides for one tenant. Not thread-safe; every method returns at once.

    Who calls what: ``swap_bytes_needed`` and ``register`` when the rank registers chunks; ``on_sqe`` for every
    submission entry; ``on_io_done`` exactly once for every StartIo that was returned; ``plan_request`` when the rank
    uploads a trace, ``residency.plan`` on what that returns, wherever there is time for it, and ``adopt_plan`` with
    the outcome; ``drain`` before shutdown. Each returned action is to be carried out, in order.
    """

    def __init__(
        self,
        *,
        num_frames: int,
        frame_bytes: int,
        block_bytes: int,
        table: TableWriter,
        extents: Sequence[ExtentAllocator],
        verify: bool,
        chunks_max: int,
        in_flight_frames_max: int,
    ) -> None:
        """The arena is empty, and no chunk is registered.

        Args:
            block_bytes: size of the I/O blocks that one checksum covers.
            extents: free space of each swap file, in the order of StartIo.file; growing it is the caller's.
            in_flight_frames_max: frames that prefetch may have readied ahead of the rank, in flight or done.
        """
        if num_frames <= 0 or in_flight_frames_max < 0:
            raise ValueError(f"num_frames = {num_frames}, in_flight_frames_max = {in_flight_frames_max}")
        self._in_flight_frames_max = in_flight_frames_max
        self._catalog = Catalog(
            num_frames=num_frames,
            frame_bytes=frame_bytes,
            block_bytes=block_bytes,
            extents=extents,
            chunks_max=chunks_max,
        )
        self._tier = HostTier(
            self._catalog, block_bytes, table, verify=verify, in_flight_frames_max=in_flight_frames_max
        )
        self._plans: dict[int, Plan] = {}
        self._leases = LeaseQueue(self._catalog, self._tier)
        self._failed: OrderedDict[int, bool] = OrderedDict()
        """The last LEASES_MAX that were answered with an error."""
        self._last_seq = -1
        self._write_failure: Cqe | None = None
        self._draining = False
        self._completions: list[Cqe] = []

    # Chunks.

    def swap_bytes_needed(self, specs: Sequence[ChunkSpec]) -> list[int]:
        """Bytes by which each swap file and its allocator must grow before ``register(specs)``."""
        return self._catalog.swap_bytes_needed(specs)

    def check(self, specs: Sequence[ChunkSpec]) -> None:
        """Whether ``register(specs)`` would refuse them, before anything is reserved. Raises ValueError or BudgetError,
        and changes nothing."""
        self._catalog.check(specs)

    def register(self, specs: Sequence[ChunkSpec]) -> range:
        """Ids of the new chunks. Raises ValueError, BudgetError or SwapSpaceError, and has then changed nothing.

        Pinned kinds have their frames reserved here; they are assigned at the first lease and kept for good.
        """
        chunks = self._catalog.register(specs)
        for chunk in chunks:
            self._tier.admit(chunk)
        return range(chunks[0].chunk_id, chunks[-1].chunk_id + 1) if chunks else range(0)

    def unregister(self, chunks: range) -> list[Action]:
        """Give back frames and extents (after their I/O in flight, if any). Traces that name the chunks are dropped.

        ValueError if a chunk is unknown or leased; nothing has changed then.
        """
        for chunk_id in chunks:
            chunk = self._catalog.chunks.get(chunk_id)
            if chunk is None or chunk.retired:
                raise ValueError(f"chunk {chunk_id} is not registered")
            if any(item.claims for item in chunk.present()):
                raise ValueError(f"chunk {chunk_id} is leased")
        self._drop_plans(chunks)
        for chunk_id in chunks:  # one by one: a list of them would be freed in one go, which holds up all threads
            chunk = self._catalog.chunks[chunk_id]
            self._catalog.retire(chunk)
            self._retire(chunk)
        return self._finish_event()

    # Events.

    def on_sqe(self, sqe: Sqe) -> list[Action]:
        """One submission. Never raises: what is malformed is answered with BAD_REQUEST and changes nothing."""
        seq, opcode, flags, read_mask, write_mask, chunk, arg, dirty_mask, dead_mask = sqe
        if seq <= self._last_seq or flags:
            accepted = False
        elif opcode == Opcode.ACQUIRE:
            accepted = not dirty_mask | dead_mask and self._acquire(seq, chunk, read_mask, write_mask)
        elif opcode == Opcode.RELEASE:
            accepted = not read_mask | write_mask and self._release(chunk, arg, dirty_mask, dead_mask)
        elif opcode == Opcode.MARK:
            self._tier.start_pass(self._plans.get(arg))
            accepted = True
        elif opcode == Opcode.ECHO:
            self._completions.append(Cqe(seq, Status.OK))
            accepted = True
        else:
            accepted = False
        if not accepted:
            self._tier.counters.rejected += 1
            return [Cqe(seq, Status.BAD_REQUEST, chunk=chunk)]
        self._last_seq = seq
        return self._finish_event()

    def on_io_done(self, io_id: int, end: IoEnd) -> list[Action]:
        """A StartIo has ended. KeyError if it is not in flight."""
        transfer = self._tier.finish(io_id, end)
        if transfer is None:
            return []
        if transfer.failure is not None:
            self._fail(self._stricken(transfer), transfer.failure)
        chunk = self._catalog.chunks[transfer.item.chunk]
        if chunk.retired:
            self._retire(chunk)
        else:
            self._leases.settle(transfer.item)
        return self._finish_event()

    def plan_request(self, accesses: Sequence[Access]) -> PlanRequest:
        """What ``residency.plan`` needs, here or elsewhere, to plan for these accesses. ValueError if
        they do not fit the registered chunks."""
        trace = accesses if isinstance(accesses, Trace) else Trace.from_accesses(accesses)
        if trace.geometry is not None and trace.geometry != self._catalog.geometry():
            raise ValueError("the trace was taken on chunks of other sizes")
        trace.validate(self._catalog.kind_masks())
        usable_frames = self._catalog.usable_frames
        object_frames = self._catalog.object_frames()
        shared_frames = usable_frames  # all that is used fits, and nothing streams
        if object_frames[trace.touched_objects()].sum(dtype=np.int64) > usable_frames:
            shared_frames = frames_to_plan(usable_frames, self._in_flight_frames_max, self._catalog.demand_frames_max)
        return PlanRequest(trace, object_frames, shared_frames)

    def adopt_plan(self, trace_id: int, plan: Plan) -> list[Action]:
        """Follow ``plan`` from the next MARK of ``trace_id`` on. ValueError if it does not fit the registered chunks,
        or there are too many traces."""
        no_deaths = np.zeros_like(plan.read_mask)
        Trace(plan.chunk, plan.read_mask, plan.write_mask, no_deaths).validate(self._catalog.kind_masks())
        if trace_id not in self._plans and len(self._plans) >= TRACES_MAX:
            raise ValueError(f"more than {TRACES_MAX} traces")
        self._plans[trace_id] = plan
        return self._finish_event()

    def drain(self) -> list[Action]:
        """Start no more I/O than the leases in hand need: prefetch and write-behind end, queued and new leases are
        refused with SHUTTING_DOWN. When ``idle`` is true after this, no frame and no extent is being touched."""
        self._draining = True
        self._tier.stop_working_ahead()
        self._fail(self._leases.waiting(), Cqe(0, Status.SHUTTING_DOWN))
        return self._finish_event()

    def dismantle(self) -> None:
        """Let go of everything, piece by piece, when nothing is asked of it any more: freed in one go, a large tenant
        would hold up all threads."""
        self._leases.dismantle()
        self._plans.clear()
        self._tier.dismantle()
        while self._catalog.chunks:
            self._catalog.chunks.popitem()

    # What it came to.

    @property
    def traces(self) -> Set[int]:
        """Those that have a plan."""
        return self._plans.keys()

    @property
    def idle(self) -> bool:
        """No I/O is in flight."""
        return self._tier.idle

    @property
    def counters(self) -> Counters:
        return self._tier.counters

    @property
    def resident_bytes(self) -> list[int]:
        """Bytes of the objects that have frames, by ObjectKind."""
        return self._tier.resident_bytes

    @property
    def num_free_frames(self) -> int:
        return self._tier.free_frames

    @property
    def num_leases(self) -> int:
        """Outstanding: queued, held or granted."""
        return len(self._leases)

    @property
    def geometry(self) -> Geometry:
        """The geometry of the chunks registered now, for a Trace that is to be kept."""
        return self._catalog.geometry()

    # Private: submission entries.

    def _acquire(self, seq: int, chunk_id: int, read_mask: int, write_mask: int) -> bool:
        chunk = self._catalog.chunks.get(chunk_id)
        mask = read_mask | write_mask
        if chunk is None or chunk.retired or not mask or mask & ~chunk.kind_mask or len(self._leases) >= LEASES_MAX:
            return False
        if self._draining:
            self._answer(seq, Cqe(0, Status.SHUTTING_DOWN, chunk=chunk_id))
            return True
        if self._write_failure is not None:
            self._answer(seq, self._write_failure)
            return True
        objects = chunk.select(mask)
        num_frames = sum([item.num_frames for item in objects if not item.flags & _PINNED])
        self._leases.ask(Lease(seq, chunk, read_mask, write_mask, objects, num_frames))
        return True

    def _release(self, chunk_id: int, seq: int, dirty_mask: int, dead_mask: int) -> bool:
        lease = self._leases.get(seq)
        if lease is None:
            return self._failed.pop(seq, False)
        if chunk_id != lease.chunk.chunk_id or dirty_mask & ~lease.write_mask:
            return False
        if dead_mask & ~(lease.read_mask | lease.write_mask):
            return False
        if lease.state is not LeaseState.GRANTED and dirty_mask | dead_mask:
            return False
        self._leases.end(lease, dirty_mask, dead_mask)
        for item in lease.objects:
            self._leases.settle(item)
        return True

    def _finish_event(self) -> list[Action]:
        self._leases.serve()
        self._tier.work_ahead(prefetch=not self._leases.are_short_of_frames)
        actions: list[Action] = [*self._tier.take_started(), *self._completions, *self._leases.take_granted()]
        self._completions.clear()
        return actions

    # Private: failures and departures.

    def _stricken(self, transfer: Transfer) -> list[Lease]:
        """Leases that a failed transfer takes with it. A failed swap-in: those that wait for these contents (behind a
        lease that will overwrite them nobody does). A failed swap-out: nothing is lost, but the tenant's contents no
        longer fit the arena safely, so everybody who waits for frames, now or later."""
        item = transfer.item
        if transfer.write:
            self._write_failure = self._write_failure or transfer.failure
            self._tier.stop_working_ahead()
            return self._leases.waiting()
        stricken: list[Lease] = []
        for seq, writes in item.claims.items():
            lease = self._leases.outstanding(seq)
            if (lease.read_mask & lease.held_mask) >> item.kind & 1:
                stricken.append(lease)
            if writes:
                break
        return stricken

    def _fail(self, leases: Sequence[Lease], failure: Cqe) -> None:
        for lease in leases:
            self._leases.end(lease)
            self._answer(lease.seq, failure)
        for lease in leases:
            for item in lease.objects:
                self._leases.settle(item)

    def _answer(self, seq: int, failure: Cqe) -> None:
        """A lease ends with an error."""
        self._completions.append(failure._replace(seq=seq))
        self._failed[seq] = True
        if len(self._failed) > LEASES_MAX:
            self._failed.popitem(last=False)

    def _drop_plans(self, chunks: range) -> None:
        """Forget the plans that name one of ``chunks``, also one that is still followed and has a successor."""

        def is_void(plan: Plan) -> bool:
            return bool(((plan.chunk >= chunks.start) & (plan.chunk < chunks.stop)).any())

        self._plans = {trace_id: each for trace_id, each in self._plans.items() if not is_void(each)}
        if (followed := self._tier.plan) is not None and is_void(followed):
            self._tier.start_pass(None)

    def _retire(self, chunk: Chunk) -> None:
        """Free what is not in I/O; the chunk itself when nothing is."""
        if self._tier.retire(chunk):
            self._catalog.remove(chunk)

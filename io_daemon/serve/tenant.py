"""One attached rank: takes its submissions, asks its scheduler, has done what that decides.

What it owns lies in ``holdings``; ``close`` gives all of it back, once the last I/O in flight has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final, TypeVar

from io_daemon.config import ServeConfig
from io_daemon.disk.swap_file import Owner
from io_daemon.errors import ProtocolError
from io_daemon.policy.actions import Action, Hurry, StartIo
from io_daemon.policy.extents import ExtentAllocator
from io_daemon.policy.residency import Plan
from io_daemon.policy.scheduler import TRACES_MAX, TenantScheduler
from io_daemon.policy.trace import Trace
from io_daemon.policy.window import ahead_bytes, window_frames
from io_daemon.serve.holdings import NUM_CQES, NUM_SQES, Holdings
from io_daemon.serve.in_flight import InFlight
from io_daemon.serve.planner import Planner
from io_daemon.serve.plans import PlansToCome
from io_daemon.serve.swap_device import SwapDevice
from io_daemon.serve.threads import in_thread
from io_daemon.shared.arena import arena_bytes
from io_daemon.shared.bulk import free_piecemeal
from io_daemon.shared.control import Attach, Attached, Ended
from io_daemon.shared.metrics import IoTotals, TenantStats
from io_daemon.shared.protocol import ChunkSpec, Cqe, IoEnd, Opcode, Sqe, Status
from io_daemon.shared.states import TENANT_TRANSITIONS, TenantState, transition

log = logging.getLogger(__name__)

BATCH_MAX: Final = 64
"""Submissions taken in one turn of the loop, so that one busy rank does not keep the others waiting."""
ROOM_RETRY_S: Final = 0.001
"""How soon to look again for room in a completion ring that its rank does not empty."""

T = TypeVar("T")

_tenant_ids = itertools.count(1)


class Tenant:
    """``on_end`` is called with the reason when the tenant cannot go on; whoever gave it then closes the tenant."""

    def __init__(
        self,
        request: Attach,
        holdings: Holdings,
        pid: int,
        config: ServeConfig,
        planner: Planner,
        on_end: Callable[[Ended], None],
    ) -> None:
        self.tenant_id = next(_tenant_ids)
        self.job, self.rank, self.pid = request.job, request.rank, pid
        self.frame_bytes = request.frame_bytes
        self.state = TenantState.ATTACHED
        self._request = request
        self._config = config
        self._on_end = on_end
        self._listening = False
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._unanswered: set[int] = set()
        self._rejected = False
        self._num_chunks = 0
        self._plans = PlansToCome(planner, str(self))
        self._scheduler_turn = asyncio.Lock()
        self._is_apart = False
        """A thread has the scheduler."""
        self._ended: list[tuple[StartIo, IoEnd]] = []
        """I/O that ended meanwhile, as ``on_io_done`` was told."""
        self._in_flight = InFlight()
        self._holdings = holdings
        self.table, self.rings, self.seats = holdings.table, holdings.rings, holdings.seats
        self._extents = [ExtentAllocator(0) for _ in self.seats]
        ahead = ahead_bytes(config.queue_depth, config.block_bytes, len(self.seats))
        self._scheduler = TenantScheduler(
            num_frames=request.num_frames,
            frame_bytes=request.frame_bytes,
            block_bytes=config.block_bytes,
            table=self.table,
            extents=self._extents,
            verify=config.verify_checksums,
            chunks_max=request.chunks_max,
            in_flight_frames_max=window_frames(request.num_frames, request.frame_bytes, ahead),
        )

    @classmethod
    async def attach(
        cls,
        request: Attach,
        arena_fd: int,
        pid: int,
        devices: Sequence[SwapDevice],
        config: ServeConfig,
        owner: Owner,
        planner: Planner,
        on_end: Callable[[Ended], None],
    ) -> Tenant:
        """``devices``: those that the rank named, in its order, which is that of file indexes. Raises what
        ``Holdings`` raises."""
        holdings = await asyncio.to_thread(Holdings, request, arena_fd, devices, config.block_bytes, owner)
        try:
            return cls(request, holdings, pid, config, planner, on_end)
        except BaseException:
            await asyncio.to_thread(holdings.close)
            raise

    @property
    def arena_bytes(self) -> int:
        """Header page included."""
        return arena_bytes(self._request.num_frames, self.frame_bytes)

    def __str__(self) -> str:
        return f"{self.job} rank {self.rank} (pid {self.pid})"

    @property
    def num_in_flight(self) -> int:
        """I/O requests queued at or running on the devices."""
        return self._in_flight.num_requests

    # --- control plane

    def attached(self) -> tuple[Attached, list[int]]:
        """The answer to the attach, and the fds that go with it."""
        answer = Attached(
            table_bytes=self.table.region.region_bytes,
            rings_bytes=self.rings.num_bytes,
            num_sqes=NUM_SQES,
            num_cqes=NUM_CQES,
            cq_offset=self.rings.cq_offset,
            swap_files=tuple(str(seat.swap_file.path) for seat in self.seats),
        )
        wake_fd = self.rings.rank_wake.fileno()
        return answer, [self.table.fd, self.rings.fd, wake_fd, wake_fd]

    def serve(self) -> None:
        """Begin to take submissions."""
        self.state = transition(TENANT_TRANSITIONS, self.state, TenantState.SERVING)
        self._listening = True
        self._loop.add_reader(self.rings.wake_fd, self._on_submissions)
        self._on_submissions()

    async def register(self, read: Callable[[], list[ChunkSpec]], spare_bytes: int = 0) -> range:
        """Reserve disk space, then frames and extents. Raises SwapSpaceError, BudgetError, ValueError or what ``read``
        raises; nothing has changed then.

        Args:
            read: called in a thread, says for which chunks.
            spare_bytes: if any, so much will be free beside what is: the disk space is looked for, and ``reserve``
                follows.
        """
        specs: list[ChunkSpec] = []

        def needed() -> tuple[list[int], Sequence[Action]]:
            specs.extend(read())
            self._scheduler.check(specs)
            return self._scheduler.swap_bytes_needed(specs), ()

        def enter() -> tuple[range, Sequence[Action]]:
            for allocator, num_bytes in zip(self._extents, growth_bytes, strict=True):
                allocator.grow(num_bytes)
            return self._scheduler.register(specs), ()

        try:
            growth_bytes = await self._apart(needed)
            await in_thread(lambda: self._holdings.grow(growth_bytes, self._config.swap_budget_bytes, spare_bytes))
            chunks = await self._apart(enter)
        finally:
            await asyncio.to_thread(free_piecemeal, specs)
        self._count_chunks(len(chunks))
        return chunks

    async def reserve(self) -> None:
        """Reserve the disk space that chunks were registered without. Raises SwapSpaceError."""
        await in_thread(self._holdings.reserve)

    async def unregister(self, chunks: range) -> None:
        """Raises ValueError if a chunk is unknown or leased."""
        await self._apart(lambda: (None, self._scheduler.unregister(chunks)))
        self._count_chunks(-len(chunks))

    async def set_trace(self, trace_id: int, read: Callable[[], Trace]) -> None:
        """Have a plan made for passes marked ``trace_id``; it is followed from the first of them that begins when it
        is there. ``read``, called in a thread, gives the trace. Raises ValueError for a trace that does not fit the
        chunks, or for too many traces."""
        known = self._plans.traces | self._scheduler.traces
        if trace_id not in known and len(known) >= TRACES_MAX:
            raise ValueError(f"{TRACES_MAX} traces wait for their plan or have one already")
        request = await self._apart(lambda: (self._scheduler.plan_request(read()), ()))
        await self._plans.ask(trace_id, request, self._adopt)

    async def _adopt(self, trace_id: int, plan: Plan) -> None:
        await self._apart(lambda: (None, self._scheduler.adopt_plan(trace_id, plan)))

    async def _apart(self, work: Callable[[], tuple[T, Sequence[Action]]]) -> T:
        """Have ``work`` done on the scheduler in a thread, since it may take seconds. This tenant's submissions and the
        ends of its I/O wait meanwhile; everybody else's go on. Its second result are actions to perform."""
        async with self._scheduler_turn:
            self._is_apart = True
            actions: Sequence[Action] = ()
            try:
                result, actions = await in_thread(work)
                return result
            finally:
                self._is_apart = False
                try:
                    self._perform(actions)
                except Exception as error:  # noqa: BLE001 -- whatever it is, it stays with this tenant
                    self.fail(error)
                finally:
                    self._catch_up()

    def _catch_up(self) -> None:
        """Do what had to wait for ``_apart``."""
        ended, self._ended = self._ended, []
        for each in ended:
            self.on_io_done(*each)
        if self._listening:
            self._on_submissions()

    def _count_chunks(self, change: int) -> None:
        self._num_chunks += change
        self.table.store_num_chunks(self._num_chunks)

    # --- data plane

    def on_io_done(self, io: StartIo, end: IoEnd) -> None:
        """A request of this tenant has ended."""
        if self._is_apart:
            self._ended.append((io, end))
            return
        self._in_flight.count(-1)
        if self._listening:
            try:
                self._perform(self._scheduler.on_io_done(io.io_id, end))
            except Exception as error:  # noqa: BLE001 -- whatever it is, it stays with this tenant
                self.fail(error)

    def abandon(self, io: StartIo, error: Exception) -> None:
        """A request of this tenant could not even be submitted."""
        self._in_flight.count(-1)
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """Something about this tenant went wrong, its own doing or not; it ends, and nobody else notices."""
        self._stop_listening()
        if isinstance(error, ProtocolError):
            self._on_end(Ended(reason=str(error), by_fault=True))
        else:
            log.error("%s: the daemon failed to serve it", self, exc_info=error)
            self._on_end(Ended(reason=f"the daemon failed: {type(error).__name__}: {error}", by_fault=False))

    def _on_submissions(self) -> None:
        """The rank has submitted. Takes one batch; comes again by itself while there may be more."""
        self.rings.take_wake_up()
        if self._is_apart:
            return
        try:
            # every entry may need one completion: none is taken without room for its answer
            room = NUM_CQES - self.rings.num_completions() - len(self._unanswered)
            num_wanted = max(0, min(room, BATCH_MAX))
            batch = self.rings.take(num_wanted)
            for sqe in batch:
                self._submit(sqe)
            if not self._listening:
                return  # one of them was the end of it
            if room <= 0:
                self._come_again(ROOM_RETRY_S)
            elif len(batch) == num_wanted or not self.rings.sq.prepare_sleep():
                self._come_again(0.0)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it stays with this tenant
            self.fail(error)

    def _submit(self, sqe: Sqe) -> None:
        if sqe.opcode == Opcode.ACQUIRE:
            self._unanswered.add(sqe.seq)
        elif sqe.opcode == Opcode.RELEASE:
            self._unanswered.discard(sqe.arg)
        self._perform(self._scheduler.on_sqe(sqe))

    def _perform(self, actions: Sequence[Action]) -> None:
        devices: dict[SwapDevice, None] = {}  # in order: what is done is a function of what was asked
        for action in actions:
            if isinstance(action, StartIo):
                seat = self.seats[action.file]
                seat.device.enqueue(self.tenant_id, seat.request(action, self.table, self))
                devices[seat.device] = None
                self._in_flight.count(+1)
            elif isinstance(action, Hurry):
                for seat in self.seats:
                    seat.device.hurry(self.tenant_id)
            else:
                self._complete(action)
        for device in devices:
            device.pump()

    def _complete(self, answer: Cqe) -> None:
        self._unanswered.discard(answer.seq)
        if answer.status == Status.BAD_REQUEST and not self._rejected:
            self._rejected = True
            log.warning("%s: submission %d is malformed, out of range or names no lease: refused", self, answer.seq)
        self.rings.answer(answer)

    def _come_again(self, delay_s: float) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(delay_s, self._on_submissions)

    # --- the end

    async def drain(self) -> None:
        """Refuse new leases and wait until the I/O of those granted has ended."""
        async with self._scheduler_turn:
            if self.state is TenantState.SERVING:
                self.state = transition(TENANT_TRANSITIONS, self.state, TenantState.DRAINING)
                self._perform(self._scheduler.drain())
        await self._in_flight.end()

    def unlink_files(self) -> None:
        """Remove the names of the swap files; their space follows when the last I/O has let go of them."""
        for seat in self.seats:
            try:
                seat.swap_file.unlink()
            except OSError as error:  # a directory that has become read-only, say: all else is still given back
                log.error("%s: %s stays: %s", self, seat.swap_file.path, error.strerror)

    async def close(self) -> None:
        """Drop what is queued, wait for what is in flight, give everything back. Idempotent."""
        if self.state in (TenantState.GONE, TenantState.RECLAIMED):
            return
        self.state = transition(TENANT_TRANSITIONS, self.state, TenantState.GONE)
        self._stop_listening()
        for seat in self.seats:
            self._in_flight.count(-seat.device.forget(self.tenant_id))
        await asyncio.to_thread(self.unlink_files)  # a journal may have to be waited for
        await self._plans.end()
        await self._in_flight.end()
        async with self._scheduler_turn:  # a plan that was cancelled may still be looked at in a thread
            await asyncio.to_thread(self._give_back)
        self.state = transition(TENANT_TRANSITIONS, self.state, TenantState.RECLAIMED)

    def _give_back(self) -> None:
        self._scheduler.dismantle()
        self._holdings.close()

    def _stop_listening(self) -> None:
        self._listening = False
        self._loop.remove_reader(self.rings.wake_fd)
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    # --- figures

    def stats(self) -> TenantStats:
        return TenantStats(
            job=self.job,
            rank=self.rank,
            pid=self.pid,
            page_locked=self._request.page_locked,
            arena_bytes=self._request.num_frames * self.frame_bytes,
            num_frames=self._request.num_frames,
            frames_free=self._scheduler.num_free_frames,
            resident_bytes=tuple(self._scheduler.resident_bytes),
            num_chunks=self._num_chunks,
            num_plans=self._plans.num_made,
            num_leases=self._scheduler.num_leases,
            num_in_flight=self.num_in_flight,
            swap_bytes=self._holdings.swap_bytes,
            swap_files=tuple(str(seat.swap_file.path) for seat in self.seats),
            # every count under its name: one that is missing on either side is refused
            total=IoTotals.model_validate({**asdict(self._scheduler.counters), "io_s": self._in_flight.total_s}),
        )

"""A seeded world around the scheduler: tenants whose contents are known, a rank that runs steps, a virtual clock.

``ModelTenant`` drives one TenantScheduler over a FakeMemory and a FakeDisk and checks every granted lease against what
its objects must contain. ``Simulator`` adds time: one disk with bandwidth, latency, reordering and errors behind a
FairQueue, and ranks that compute while later leases are on their way. The same seed gives the same run.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from io_daemon.policy.actions import Action, Hurry, StartIo
from io_daemon.policy.counters import Counters
from io_daemon.policy.extents import ExtentAllocator
from io_daemon.policy.fair_queue import FairQueue
from io_daemon.policy.residency import plan
from io_daemon.policy.scheduler import TenantScheduler
from io_daemon.shared.protocol import PAGE_BYTES, Access, ChunkSpec, Cqe, IoEnd, Opcode, Sqe, Status
from tests.support.fake_disk import WELL, FakeDisk, FakeMemory
from tests.support.truth import ModelLease, Truth


class ModelTenant:
    """One tenant and the truth about its contents. ``start`` is given each StartIo (default: the disk at once)."""

    def __init__(
        self,
        *,
        num_frames: int,
        frame_bytes: int = PAGE_BYTES,
        num_files: int = 1,
        chunks_max: int = 1 << 12,
        in_flight_frames_max: int = 8,
        start: Callable[[StartIo], None] | None = None,
        hurry: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = FakeMemory(num_frames)
        self.disk = FakeDisk(self.memory)
        self.extents = [ExtentAllocator(0) for _ in range(num_files)]
        self.scheduler = TenantScheduler(
            num_frames=num_frames,
            frame_bytes=frame_bytes,
            block_bytes=PAGE_BYTES,
            table=self.memory,
            extents=self.extents,
            verify=True,
            chunks_max=chunks_max,
            in_flight_frames_max=in_flight_frames_max,
        )
        self.truth = Truth(self.memory)
        self.failures: dict[int, Cqe] = {}
        self.at_mark = Counters()
        """As they stood when the last pass began."""
        self.on_grant: Callable[[int], None] = lambda _seq: None
        self._start = start if start is not None else self.disk.start
        self._hurry = hurry
        self._seqs = itertools.count(1)

    @property
    def leases(self) -> dict[int, ModelLease]:
        """Those not released yet, by seq."""
        return self.truth.leases

    def register(self, specs: Sequence[ChunkSpec]) -> range:
        for allocator, needed in zip(self.extents, self.scheduler.swap_bytes_needed(specs), strict=True):
            allocator.grow(needed)
        chunks = self.scheduler.register(specs)
        self.truth.add(chunks, specs)
        return chunks

    def unregister(self, chunks: range) -> None:
        self.take(self.scheduler.unregister(chunks))

    def acquire(self, chunk: int, *, read: int = 0, write: int = 0) -> int:
        seq = next(self._seqs)
        self.truth.issue(seq, chunk, read=read, write=write)
        self.take(self.scheduler.on_sqe(Sqe(seq, Opcode.ACQUIRE, 0, read, write, chunk, 0)))
        return seq

    def release(self, lease_seq: int, *, dirty: int = 0, dead: int = 0) -> None:
        """Write new versions of the dirty kinds, then release."""
        lease = self.truth.release(lease_seq, dirty=dirty, dead=dead)
        seq = next(self._seqs)
        self.take(self.scheduler.on_sqe(Sqe(seq, Opcode.RELEASE, 0, 0, 0, lease.chunk, lease_seq, dirty, dead)))
        if seq in self.failures:
            raise AssertionError(f"release of {lease_seq} was refused: {self.failures[seq]}")

    def mark(self, trace_id: int) -> None:
        self.at_mark = copy.deepcopy(self.scheduler.counters)
        self.take(self.scheduler.on_sqe(Sqe(next(self._seqs), Opcode.MARK, 0, 0, 0, 0, trace_id)))

    def set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        self.take(self.scheduler.adopt_plan(trace_id, plan(self.scheduler.plan_request(accesses))))

    def send(
        self,
        opcode: int,
        *,
        flags: int = 0,
        read: int = 0,
        write: int = 0,
        chunk: int = 0,
        arg: int = 0,
        dirty: int = 0,
        dead: int = 0,
    ) -> int:
        """Any submission entry at all."""
        seq = next(self._seqs)
        self.take(self.scheduler.on_sqe(Sqe(seq, opcode, flags, read, write, chunk, arg, dirty, dead)))
        return seq

    def finish(self, io_id: int, outcome: IoEnd = WELL) -> StartIo:
        action = self.disk.finish(io_id, outcome)
        self.take(self.scheduler.on_io_done(io_id, outcome))
        return action

    def finish_all(self) -> None:
        """End all I/O well, oldest first, and what follows from it."""
        while self.disk.in_flight:
            self.finish(next(iter(self.disk.in_flight)))

    def take(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, StartIo):
                self._start(action)
            elif isinstance(action, Hurry):
                self._hurry()
            elif action.status != Status.OK:
                self.failures[action.seq] = action
                self.leases.pop(action.seq, None)
                self.on_grant(action.seq)
            elif action._replace(chunk=0, born_mask=0) != Cqe(action.seq, Status.OK):
                raise AssertionError(f"a grant names no failure: {action}")
            elif action.seq in self.leases:
                self.truth.grant(action.seq, action.born_mask)
                self.on_grant(action.seq)


def counted_since(earlier: Counters, now: Counters) -> Counters:
    """What lies between two states of the same counters."""
    between = copy.deepcopy(now)
    for name, before in asdict(earlier).items():
        after = getattr(now, name)
        is_list = isinstance(after, list)
        setattr(between, name, [a - b for a, b in zip(after, before, strict=True)] if is_list else after - before)
    return between


@dataclass(frozen=True, kw_only=True)
class DiskModel:
    """Times in microseconds of virtual time. ``fault`` may turn an I/O into an error."""

    read_bytes_per_us: float = 1000.0
    write_bytes_per_us: float = 1000.0
    latency_us: float = 80.0
    jitter: float = 2.0
    """An I/O's latency is drawn from [1, 1 + jitter) times latency_us: so completions overtake each other."""
    in_flight_bytes_max: int = 32 * PAGE_BYTES
    one_channel: bool = False
    """Reads and writes share one way to the medium, first come, first served."""
    fault: Callable[[random.Random, StartIo], IoEnd | None] = lambda _rng, _action: None


class Simulator:
    """Virtual time, one disk, any number of ranks. ``run`` ends when every rank has."""

    def __init__(self, seed: int, disk: DiskModel) -> None:
        self.rng = random.Random(seed)
        self.now_us = 0.0
        self.ranks: list[Rank] = []
        self._disk = disk
        self._queue: FairQueue[StartIo] = FairQueue(disk.in_flight_bytes_max, quantum_bytes=PAGE_BYTES)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._channel_free_us = {False: 0.0, True: 0.0}

    def add_rank(
        self,
        tenant_options: Mapping[str, int],
        *,
        passes: Sequence[Pass],
        leases_ahead: int = 2,
        compute_us: float = 0.0,
    ) -> Rank:
        """``tenant_options`` are those of ModelTenant; register the chunks with ``rank.tenant``."""
        index = len(self.ranks)
        tenant = ModelTenant(
            **tenant_options,
            start=functools.partial(self._queue.push, index),
            hurry=functools.partial(self._queue.hurry, index),
        )
        rank = Rank(self, tenant, passes=passes, leases_ahead=leases_ahead, compute_us=compute_us)
        self.ranks.append(rank)
        return rank

    def after(self, delay_us: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_us + delay_us, next(self._order), event))

    def run(self, until: Rank | None = None) -> None:
        """Until all ranks have finished, or this one has. AssertionError if nothing can happen any more before."""
        for rank in self.ranks:
            self.after(0, rank.proceed)
        while self._events:
            if until is not None and until.finished:
                return
            self.now_us, _, event = heapq.heappop(self._events)
            event()
            self._start_io()
        for index, rank in enumerate(self.ranks):
            if not rank.finished:
                raise AssertionError(f"rank {index} waits for ever: {rank.waiting_for()}")
            rank.tenant.memory.check_whole()

    def _start_io(self) -> None:
        while (popped := self._queue.pop()) is not None:
            index, action = popped
            self.ranks[index].tenant.disk.start(action)
            rate = self._disk.write_bytes_per_us if action.write else self._disk.read_bytes_per_us
            channel = action.write and not self._disk.one_channel
            begin_us = max(self.now_us, self._channel_free_us[channel])
            self._channel_free_us[channel] = begin_us + action.num_bytes / rate
            latency_us = self._disk.latency_us * (1 + self._disk.jitter * self.rng.random())
            delay_us = self._channel_free_us[channel] + latency_us - self.now_us
            self.after(delay_us, functools.partial(self._end_io, index, action))

    def _end_io(self, index: int, action: StartIo) -> None:
        self._queue.complete(action)
        outcome = self._disk.fault(self.rng, action)
        self.ranks[index].tenant.finish(action.io_id, outcome if outcome is not None else WELL)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over ``accesses``; ``upload``: the rank uploads them as trace ``trace_id`` when the pass has ended."""

    accesses: Sequence[Access]
    trace_id: int = 0
    upload: bool = False


class Rank:
    """Runs passes in order: acquires up to ``leases_ahead`` accesses ahead, computes, releases.

    A write mask is dirty when it is released. ``stall_us`` is the time without work to do, ``waits_us`` its parts,
    one an access, ``pass_ends_us`` when each pass ended. A lease that fails ends the rank; ``failure`` says why.
    """

    def __init__(
        self, simulator: Simulator, tenant: ModelTenant, *, passes: Sequence[Pass], leases_ahead: int, compute_us: float
    ) -> None:
        self.tenant = tenant
        self.stall_us = 0.0
        self.waits_us: list[float] = []
        self.pass_ends_us: list[float] = []
        self.failure: Cqe | None = None
        self.finished = False
        self._simulator = simulator
        self._compute_us = compute_us
        self._leases_ahead = leases_ahead
        self._script = [(each, index) for each in passes for index in range(len(each.accesses))]
        self._issued: deque[int] = deque()
        self._num_issued = self._num_done = 0
        self._computing = False
        self._idle_since_us = 0.0
        tenant.on_grant = self._on_grant

    def waiting_for(self) -> str:
        each, index = self._script[self._num_done]
        return f"access {index} of trace {each.trace_id}, {each.accesses[index]}"

    def proceed(self) -> None:
        self._issue()
        if self._computing or self.finished or not self._issued:
            return
        seq = self._issued[0]
        if seq in self.tenant.failures:
            self._end(self.tenant.failures[seq])
        elif self.tenant.leases[seq].granted:
            self._computing = True
            self.waits_us.append(self._simulator.now_us - self._idle_since_us)
            self.stall_us += self.waits_us[-1]
            self._simulator.after(self._compute_us, self._compute_ended)

    def _issue(self) -> None:
        while self._num_issued < min(len(self._script), self._num_done + 1 + self._leases_ahead) and not self.finished:
            each, index = self._script[self._num_issued]
            if index == 0:
                if self._issued:
                    return  # a pass begins when the last one has ended
                self.tenant.mark(each.trace_id)
            access = each.accesses[index]
            self._num_issued += 1
            self._issued.append(-1)
            self._issued[-1] = self.tenant.acquire(access.chunk, read=access.read_mask, write=access.write_mask)

    def _on_grant(self, seq: int) -> None:
        if self._issued and self._issued[0] in (seq, -1):
            self._simulator.after(0, self.proceed)

    def _compute_ended(self) -> None:
        each, index = self._script[self._num_done]
        access = each.accesses[index]
        self._computing = False
        self._idle_since_us = self._simulator.now_us
        self._num_done += 1
        self.tenant.release(self._issued.popleft(), dirty=access.write_mask, dead=access.dead_mask)
        if index + 1 == len(each.accesses):
            self.pass_ends_us.append(self._simulator.now_us)
            if each.upload:
                self.tenant.set_trace(each.trace_id, each.accesses)
        if self._num_done == len(self._script):
            self._end(None)
        self.proceed()

    def _end(self, failure: Cqe | None) -> None:
        self.failure, self.finished = failure, True
        for seq in self._issued:
            if seq in self.tenant.leases:
                self.tenant.release(seq)
        self._issued.clear()

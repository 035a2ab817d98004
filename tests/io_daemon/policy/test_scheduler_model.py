"""The scheduler against a model, in any order of events that hypothesis can think of.

Checked by ModelTenant, FakeMemory and FakeDisk on every step: a granted lease sees exactly the last dirty version (or
zeros), nothing changes under a read lease or under I/O, frames are never shared and never leak, states change as
allowed. Checked here: every lease is granted if the rank finishes its leases in order of issue, and the books balance.
"""

from __future__ import annotations

import errno

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from io_daemon.errors import BudgetError
from io_daemon.shared.protocol import KINDS_MAX, PAGE_BYTES, Access, ChunkSpec, IoEnd, Opcode, Status
from io_daemon.shared.states import FrameState
from tests.support.simulator import ModelTenant

MASKS = st.integers(0, 7)
SPECS = st.builds(
    lambda sizes, pinned: ChunkSpec(
        tuple(size * PAGE_BYTES for size in sizes), pinned & sum(1 << kind for kind, size in enumerate(sizes) if size)
    ),
    st.tuples(st.integers(1, 2), st.integers(0, 2), st.integers(0, 3)),
    st.sampled_from([0, 0, 0, 1, 2]),
)
FAULTS = st.sampled_from(
    [
        IoEnd(Status.IO_ERROR, errno.EIO, 4096, 4096, 0),
        IoEnd(Status.SHORT_IO, 0, 8192, 4096, 512),
        IoEnd(Status.INTEGRITY, 0, 0, 0x1234, 0x4321),
    ]
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        specs=st.lists(SPECS, min_size=2, max_size=5),
        spare_frames=st.integers(0, 8),
        window=st.integers(0, 6),
        num_files=st.integers(1, 2),
    )
    def begin(self, specs: list[ChunkSpec], spare_frames: int, window: int, num_files: int) -> None:
        frames = [[size // PAGE_BYTES for size in spec.object_bytes] for spec in specs]
        pinned = sum(
            n for spec, each in zip(specs, frames, strict=True) for k, n in enumerate(each) if spec.pinned_mask >> k & 1
        )
        demand = max(
            sum(n for k, n in enumerate(each) if not spec.pinned_mask >> k & 1)
            for spec, each in zip(specs, frames, strict=True)
        )
        self.tenant = ModelTenant(
            num_frames=pinned + demand + spare_frames, num_files=num_files, in_flight_frames_max=window, chunks_max=8
        )
        self.specs = dict(zip(self.tenant.register(specs), specs, strict=True))
        self.write_failed = False
        self.traces: dict[int, list[Access]] = {}

    def kinds(self, chunk: int) -> int:
        return sum(1 << kind for kind, size in enumerate(self.specs[chunk].object_bytes) if size)

    @rule(data=st.data(), asked=st.lists(st.tuples(MASKS, st.sampled_from([0, 0, 1, 2, 7])), min_size=1, max_size=4))
    def acquire(self, data: st.DataObject, asked: list[tuple[int, int]]) -> None:
        """Several leases on one chunk, one behind the other."""
        if not self.specs or len(self.tenant.leases) > 12:
            return
        chunk = data.draw(st.sampled_from(sorted(self.specs)))
        for read, write in asked:
            read, write = read & self.kinds(chunk), write & self.kinds(chunk)
            if read | write:
                seq = self.tenant.acquire(chunk, read=read, write=write)
                assert not self.write_failed or self.tenant.failures[seq].error_number == errno.ENOSPC

    @rule(data=st.data(), uses=st.lists(st.tuples(MASKS, MASKS), min_size=2, max_size=8))
    def use(self, data: st.DataObject, uses: list[tuple[int, int]]) -> None:
        """Write here and there, one lease after the other."""
        for read, write in uses:
            if not self.specs or self.tenant.leases:
                return
            chunk = data.draw(st.sampled_from(sorted(self.specs)))
            self.play(Access(chunk, read & self.kinds(chunk), write & self.kinds(chunk), 0), finish_all=True)

    @rule(trace_id=st.integers(0, 1), num_passes=st.integers(1, 3), finish_all=st.booleans())
    def step(self, trace_id: int, num_passes: int, finish_all: bool) -> None:
        """Whole passes over a known trace."""
        for _ in range(num_passes):
            if self.tenant.leases or not self.specs or trace_id not in self.traces:
                return
            self.tenant.mark(trace_id)
            for access in self.traces[trace_id]:
                if access.chunk in self.specs:
                    self.play(access, finish_all=finish_all)

    def play(self, access: Access, *, finish_all: bool) -> None:
        mask = (access.read_mask | access.write_mask) & self.kinds(access.chunk)
        if not mask:
            return
        seq = self.tenant.acquire(access.chunk, read=access.read_mask & mask, write=access.write_mask & mask)
        while seq in self.tenant.leases and not self.tenant.leases[seq].granted:
            assert self.tenant.disk.in_flight, f"lease {seq} waits for ever"
            self.tenant.finish(min(self.tenant.disk.in_flight))
        if finish_all:
            self.tenant.finish_all()
        if seq in self.tenant.leases:
            self.tenant.release(seq, dirty=access.write_mask & mask, dead=access.dead_mask & mask)

    @precondition(lambda self: any(lease.granted for lease in self.tenant.leases.values()))
    @rule()
    def release_all(self) -> None:
        for seq in [seq for seq, lease in self.tenant.leases.items() if lease.granted]:
            self.tenant.release(seq, dirty=self.tenant.leases[seq].write_mask)

    @precondition(lambda self: any(lease.granted for lease in self.tenant.leases.values()))
    @rule(data=st.data(), dirty=MASKS, dead=st.sampled_from([0, 0, 0, 1, 2, 7]))
    def release(self, data: st.DataObject, dirty: int, dead: int) -> None:
        granted = [seq for seq, lease in self.tenant.leases.items() if lease.granted]
        lease = self.tenant.leases[data.draw(st.sampled_from(granted))]
        dead &= lease.read_mask | lease.write_mask
        self.tenant.release(lease.seq, dirty=dirty & lease.write_mask, dead=dead)

    @precondition(lambda self: any(not lease.granted for lease in self.tenant.leases.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [seq for seq, lease in self.tenant.leases.items() if not lease.granted]
        self.tenant.release(data.draw(st.sampled_from(waiting)))

    @precondition(lambda self: self.tenant.disk.in_flight)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.tenant.finish(data.draw(st.sampled_from(sorted(self.tenant.disk.in_flight))))

    @precondition(lambda self: self.tenant.disk.in_flight)
    @rule()
    def finish_all(self) -> None:
        self.tenant.finish_all()

    @rule(data=st.data(), outcome=FAULTS)
    def fail_a_read(self, data: st.DataObject, outcome: IoEnd) -> None:
        reads = [io_id for io_id, (action, _) in self.tenant.disk.in_flight.items() if not action.write]
        if not reads:
            return
        before = set(self.tenant.failures)
        action = self.tenant.finish(data.draw(st.sampled_from(reads)), outcome)
        if len([1 for a, _ in self.tenant.disk.in_flight.values() if a.object_id == action.object_id]):
            return  # its other pieces are still to come
        for seq in set(self.tenant.failures) - before:
            assert self.tenant.failures[seq].chunk == action.object_id // KINDS_MAX
            assert self.tenant.failures[seq].kind == action.kind

    @precondition(lambda self: not self.write_failed)
    @rule(data=st.data(), chance=st.integers(0, 5))
    def fail_a_write(self, data: st.DataObject, chance: int) -> None:
        writes = [io_id for io_id, (action, _) in self.tenant.disk.in_flight.items() if action.write]
        if not writes or chance:
            return
        action = self.tenant.finish(
            data.draw(st.sampled_from(writes)), IoEnd(Status.IO_ERROR, errno.ENOSPC, 0, 4096, 0)
        )
        while rest := [i for i, (a, _) in self.tenant.disk.in_flight.items() if a.object_id == action.object_id]:
            self.tenant.finish(rest[0])
        self.write_failed = True

    @rule(trace_id=st.integers(0, 1), data=st.data())
    def set_trace(self, trace_id: int, data: st.DataObject) -> None:
        accesses = []
        for _ in range(data.draw(st.integers(1, 12)) if self.specs else 0):
            chunk = data.draw(st.sampled_from(sorted(self.specs)))
            read, write = (data.draw(MASKS) & self.kinds(chunk) for _ in range(2))
            if read | write:
                accesses.append(Access(chunk, read, write, data.draw(MASKS) & (read | write)))
        if accesses:
            self.tenant.set_trace(trace_id, accesses)
            self.traces[trace_id] = accesses

    @rule(
        opcode=st.integers(0, 255),
        flags=st.sampled_from([0, 0, 1]),
        read=st.integers(0, 255),
        write=st.integers(0, 255),
        chunk=st.sampled_from([7, 8, 1 << 31, (1 << 32) - 1]),
        arg=st.sampled_from([0, 1 << 63, (1 << 64) - 1]),
    )
    def send_nonsense(self, opcode: int, flags: int, read: int, write: int, chunk: int, arg: int) -> None:
        if chunk in self.specs or (opcode in (Opcode.ECHO, Opcode.MARK) and not flags):
            return
        if opcode == Opcode.RELEASE and not flags and arg in self.tenant.failures:
            return
        seq = self.tenant.send(opcode, flags=flags, read=read, write=write, chunk=chunk, arg=arg)
        assert self.tenant.failures[seq].status == Status.BAD_REQUEST

    @rule(spec=SPECS)
    def register(self, spec: ChunkSpec) -> None:
        if len(self.specs) >= 7 or len(self.tenant.scheduler.geometry.specs) >= 7:
            return
        try:
            chunks = self.tenant.register([spec])
        except BudgetError as error:
            assert error.smallest_bytes > error.budget_bytes
        else:
            self.specs[chunks[0]] = spec

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        if not self.specs:
            return
        chunk = data.draw(st.sampled_from(sorted(self.specs)))
        if any(lease.chunk == chunk for lease in self.tenant.leases.values()):
            with pytest.raises(ValueError, match="leased"):
                self.tenant.unregister(range(chunk, chunk + 1))
        else:
            self.tenant.unregister(range(chunk, chunk + 1))
            del self.specs[chunk]

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "tenant"):
            return
        self.tenant.memory.check_whole()
        free = sum(state is FrameState.FREE for state in self.tenant.memory.states)
        assert self.tenant.scheduler.num_free_frames == free
        assert self.tenant.scheduler.num_leases == len(self.tenant.leases)
        assert self.tenant.scheduler.idle == (not self.tenant.disk.in_flight)

    def teardown(self) -> None:
        """A rank that takes its leases strictly in order of issue is granted every one."""
        if not hasattr(self, "tenant"):
            return
        while self.tenant.leases:
            self.tenant.finish_all()
            if not self.tenant.leases:
                break
            first = min(self.tenant.leases)
            assert self.tenant.leases[first].granted, f"lease {first} waits for ever"
            self.tenant.release(first)
        self.tenant.finish_all()
        for chunk in sorted(self.specs):
            self.tenant.unregister(range(chunk, chunk + 1))
        self.tenant.finish_all()
        self.books_balance()
        assert self.tenant.scheduler.num_free_frames == len(self.tenant.memory.states)
        assert sum(self.tenant.scheduler.resident_bytes) == 0
        transfers = self.tenant.scheduler._tier._transfers
        assert transfers.frames_idle_out == 0
        for allocator in self.tenant.extents:
            assert allocator.free_bytes == allocator.capacity_bytes


TestSchedulerModel = SchedulerMachine.TestCase
TestSchedulerModel.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)

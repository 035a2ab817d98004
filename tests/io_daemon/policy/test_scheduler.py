"""The scheduler's rules one by one: leases, frames, write-back, death, errors, budget, pass and drain."""

from __future__ import annotations

import errno

import pytest

from io_daemon.errors import BudgetError, SwapSpaceError
from io_daemon.policy.actions import StartIo
from io_daemon.policy.extents import ExtentAllocator
from io_daemon.policy.residency import plan
from io_daemon.policy.scheduler import TenantScheduler
from io_daemon.policy.trace import Geometry, Trace
from io_daemon.shared.protocol import (
    KINDS_MAX,
    NO_EXTENT,
    PAGE_BYTES,
    Access,
    ChunkSpec,
    Cqe,
    IoEnd,
    Opcode,
    Sqe,
    Status,
)
from io_daemon.shared.states import ObjectFlags, ObjectRecord, ObjectState
from tests.support.fake_disk import FakeMemory
from tests.support.simulator import ModelTenant
from tests.support.work import lines_run

ONE = ChunkSpec((PAGE_BYTES,))
TWO_KINDS = ChunkSpec((PAGE_BYTES, PAGE_BYTES))


def tenant_of(num_frames: int, *specs: ChunkSpec, window: int = 0) -> ModelTenant:
    tenant = ModelTenant(num_frames=num_frames, in_flight_frames_max=window)
    tenant.register(specs)
    return tenant


def scheduler_of(extents: ExtentAllocator) -> TenantScheduler:
    return TenantScheduler(
        num_frames=4, frame_bytes=PAGE_BYTES, block_bytes=PAGE_BYTES, table=FakeMemory(4),
        extents=[extents], verify=True, chunks_max=3, in_flight_frames_max=0,
    )  # fmt: skip


def write(tenant: ModelTenant, chunk: int, mask: int = 1) -> None:
    """New contents; afterwards no I/O is in flight."""
    lease = tenant.acquire(chunk, write=mask)
    tenant.finish_all()
    tenant.release(lease, dirty=mask)
    tenant.finish_all()


def granted(tenant: ModelTenant, lease: int) -> bool:
    return tenant.leases[lease].granted


def record(tenant: ModelTenant, chunk: int, kind: int = 0) -> ObjectRecord:
    return tenant.memory.records[chunk * KINDS_MAX + kind]


def evict(tenant: ModelTenant, chunk: int, others: range) -> None:
    """Use the other chunks until ``chunk`` has left."""
    for other in others:
        if other != chunk:
            write(tenant, other)
    assert record(tenant, chunk).state is ObjectState.ABSENT


def in_flight(tenant: ModelTenant, *, write: bool | None = None) -> list[StartIo]:
    return [action for action, _ in tenant.disk.in_flight.values() if write is None or action.write is write]


# Contents.


def test_what_was_never_written_is_zero_without_any_io() -> None:
    tenant = tenant_of(1, ONE)
    lease = tenant.acquire(0, read=1)
    assert granted(tenant, lease)  # ModelTenant has checked born_mask
    tenant.release(lease)
    assert tenant.disk.bytes_read == tenant.disk.bytes_written == 0
    assert tenant.scheduler.num_free_frames == 1, "zeros need no frame while nobody looks"


def test_only_a_kind_that_is_read_is_said_to_be_zeros() -> None:
    """Whoever only writes it is to find no word about what was there."""
    scheduler = scheduler_of(ExtentAllocator(3 * PAGE_BYTES))
    scheduler.register([ChunkSpec((PAGE_BYTES,) * 3)])
    answer = Cqe(0, Status.OK, born_mask=0b011)
    assert scheduler.on_sqe(Sqe(0, Opcode.ACQUIRE, 0, 0b011, 0b110, 0, 0)) == [answer]


def test_a_written_object_stays_and_is_written_back_only_when_its_frame_is_wanted() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    assert not tenant.disk.bytes_written
    evict(tenant, 0, range(3))
    assert tenant.disk.bytes_written >= PAGE_BYTES
    lease = tenant.acquire(0, read=1)
    assert not granted(tenant, lease)
    tenant.finish_all()
    assert granted(tenant, lease)
    assert tenant.scheduler.counters.misses == 1


def test_pieces_cover_the_object_in_order_and_the_last_may_be_short() -> None:
    frame = 4 * PAGE_BYTES
    tenant = ModelTenant(num_frames=4, frame_bytes=frame, num_files=2, in_flight_frames_max=0)
    tenant.register([ChunkSpec((PAGE_BYTES, 2 * frame + 5)), ChunkSpec((3 * frame,))])
    lease = tenant.acquire(0, write=2)
    tenant.release(lease, dirty=2)
    tenant.acquire(1, write=1)
    pieces = in_flight(tenant)
    base = pieces[0].offset
    assert [(p.file, p.offset - base, p.num_bytes) for p in pieces] == [
        (0, 0, frame), (0, frame, frame), (0, 2 * frame, PAGE_BYTES),
    ]  # fmt: skip
    assert [p.checksum_index - pieces[0].checksum_index for p in pieces] == [0, 4, 8]
    assert all(p.write and not p.verify for p in pieces)
    assert record(tenant, 0, 1).object_bytes == 2 * frame + PAGE_BYTES
    assert record(tenant, 0, 1).pending_offset == base
    tenant.finish_all()
    assert record(tenant, 0, 1).committed_offset == base
    assert record(tenant, 0, 1).pending_offset == NO_EXTENT
    assert record(tenant, 0, 1).version == 1


def test_chunks_are_striped_over_the_files_and_contiguous_in_them() -> None:
    tenant = ModelTenant(num_frames=4, num_files=2)
    specs = [ChunkSpec((PAGE_BYTES, 2 * PAGE_BYTES))] * 3
    assert tenant.scheduler.swap_bytes_needed(specs) == [6 * PAGE_BYTES, 3 * PAGE_BYTES]
    tenant.register(specs)
    assert [record(tenant, chunk).file for chunk in range(3)] == [0, 1, 0]
    assert tenant.scheduler.swap_bytes_needed([specs[0]] * 2) == [3 * PAGE_BYTES, 3 * PAGE_BYTES]


def test_a_lease_that_comes_to_wait_for_write_behind_hurries_it_once() -> None:
    started: list[StartIo] = []
    hurried: list[bool] = []
    tenant = ModelTenant(num_frames=4, start=started.append, hurry=lambda: hurried.append(True))
    tenant.register([ONE] * 5 + [ChunkSpec((PAGE_BYTES,) * 3)])
    for chunk in range(4):
        tenant.release(tenant.acquire(chunk, write=1), dirty=1)
    waiting = tenant.acquire(4, write=1)
    assert [(io.write, io.demand) for io in started] == [(True, True), (True, False)], "one is written behind"
    assert not hurried
    tenant.release(waiting)
    tenant.acquire(5, write=7)
    tenant.acquire(3, read=1)
    assert hurried == [True]


@pytest.mark.parametrize("waits_for", ["the end of the write", "the end of dead contents"])
def test_a_lease_that_waits_for_its_own_objects_write_behind_hurries_it(waits_for: str) -> None:
    """Nobody is short of frames: without the word the write is passed over for as long as other tenants read."""
    started: list[StartIo] = []
    hurried: list[int] = []
    tenant = ModelTenant(num_frames=4, start=started.append, hurry=lambda: hurried.append(len(started)))
    tenant.register([ONE] * 5)
    for chunk in range(4):
        tenant.release(tenant.acquire(chunk, write=1), dirty=1)
    tenant.release(tenant.acquire(4, write=1))
    behind = next(io.object_id // KINDS_MAX for io in started if not io.demand)
    reader = tenant.acquire(behind, read=1)
    assert granted(tenant, reader), "what is being written may be read"
    if waits_for == "the end of the write":
        writer = tenant.acquire(behind, write=1)
        assert not hurried, "it waits for the reader"
        tenant.release(reader)
        assert not granted(tenant, writer)
    else:
        tenant.release(reader, dead=1)
        assert not hurried
        assert not granted(tenant, tenant.acquire(behind, read=1))
    assert hurried == [len(started)]


# Order of leases.


def test_readers_share_and_writers_exclude_in_order_of_issue() -> None:
    tenant = tenant_of(1, ONE)
    write(tenant, 0)
    first, second = tenant.acquire(0, read=1), tenant.acquire(0, read=1)
    writer, third = tenant.acquire(0, read=1, write=1), tenant.acquire(0, read=1)
    assert [granted(tenant, each) for each in (first, second, writer, third)] == [True, True, False, False]
    tenant.release(first)
    assert not granted(tenant, writer)
    tenant.release(second)
    assert granted(tenant, writer)
    assert not granted(tenant, third)
    tenant.release(writer, dirty=1)
    assert granted(tenant, third), "and it saw what the writer wrote"


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("earlier", ["read", "write"])
@pytest.mark.parametrize("later", ["read", "write"])
def test_leases_exclude_each_other_by_kind(kind: int, earlier: str, later: str) -> None:
    tenant = tenant_of(3, ChunkSpec((PAGE_BYTES,) * 3))
    mask, others = 1 << kind, 0b111 & ~(1 << kind)
    tenant.acquire(0, **{earlier: mask})
    assert granted(tenant, tenant.acquire(0, **{later: mask})) is (earlier == later == "read")
    assert granted(tenant, tenant.acquire(0, write=others))


def test_a_read_lease_is_granted_during_a_swap_out_and_a_write_lease_after_it() -> None:
    tenant = tenant_of(2, ONE, TWO_KINDS)
    write(tenant, 0)
    waiting = tenant.acquire(1, write=3)
    assert [action.object_id for action in in_flight(tenant, write=True)] == [0]
    reader, writer = tenant.acquire(0, read=1), tenant.acquire(0, write=1)
    assert not granted(tenant, waiting)
    tenant.release(waiting)
    assert granted(tenant, reader)
    tenant.release(reader)
    assert not granted(tenant, writer), "the kernel still reads these bytes"
    tenant.finish_all()
    assert granted(tenant, writer)


def test_leases_short_of_frames_are_served_in_order_of_issue() -> None:
    tenant = tenant_of(2, TWO_KINDS, TWO_KINDS, ONE)
    holder = tenant.acquire(0, write=1)
    large, small = tenant.acquire(1, write=3), tenant.acquire(2, write=1)
    assert not granted(tenant, large)
    assert not granted(tenant, small), "it would fit, but it is not its turn"
    tenant.release(holder)
    assert granted(tenant, large)
    assert not granted(tenant, small)
    tenant.release(large)
    assert granted(tenant, small)


def test_a_resident_chunk_may_overtake_while_it_leaves_enough() -> None:
    tenant = tenant_of(5, *[ONE] * 3, ChunkSpec((PAGE_BYTES,) * 4))
    for chunk in range(2):
        write(tenant, chunk)
    holder = tenant.acquire(2, write=1)
    large = tenant.acquire(3, write=15)
    assert not granted(tenant, large)
    first, second = tenant.acquire(0, read=1), tenant.acquire(1, read=1)
    assert granted(tenant, first), "5 frames less this one still hold the 4 that are waited for"
    assert not granted(tenant, second), "one more would leave 3: a rank that waits for the large lease would hang"
    tenant.release(holder)
    tenant.finish_all()
    assert granted(tenant, large)
    tenant.release(large)
    tenant.finish_all()
    assert granted(tenant, second)


def test_an_overtaker_never_passes_a_lease_on_its_own_object() -> None:
    tenant = tenant_of(3, ONE, ChunkSpec((PAGE_BYTES,) * 2))
    write(tenant, 0)
    holder = tenant.acquire(1, write=1)
    both = tenant.acquire(1, read=1, write=3)
    reader = tenant.acquire(1, read=1)
    assert not granted(tenant, both)
    assert not granted(tenant, reader)
    tenant.release(holder, dirty=1)
    assert granted(tenant, both)
    assert not granted(tenant, reader)


# What a release means.


def test_write_only_without_dirty_goes_back_to_the_disk() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    lease = tenant.acquire(0, write=1)
    tenant.finish_all()
    assert granted(tenant, lease)  # ModelTenant scribbles into the frame now
    assert record(tenant, 0).flags & ObjectFlags.UNFILLED
    tenant.release(lease)
    assert record(tenant, 0).state is ObjectState.ABSENT
    reader = tenant.acquire(0, read=1)
    tenant.finish_all()
    assert granted(tenant, reader)


def test_a_clean_object_that_a_lease_may_have_scribbled_over_is_read_again() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    tenant.release(tenant.acquire(0, read=1))
    tenant.finish_all()
    assert record(tenant, 0).state is ObjectState.RESIDENT
    assert not record(tenant, 0).flags & ObjectFlags.DIRTY
    lease = tenant.acquire(0, write=1)  # ModelTenant scribbles into the frame now
    assert granted(tenant, lease)
    tenant.release(lease)
    assert record(tenant, 0).state is ObjectState.ABSENT
    reader = tenant.acquire(0, read=1)
    assert [action.write for action in in_flight(tenant)] == [False]
    tenant.finish_all()
    assert granted(tenant, reader)


def test_a_reader_behind_an_undone_write_gets_the_disk_version() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    lease = tenant.acquire(0, write=1)
    tenant.finish_all()
    reader = tenant.acquire(0, read=1)
    tenant.release(lease)
    assert [action.write for action in in_flight(tenant)] == [False], "filled late, in the same frame"
    tenant.finish_all()
    assert granted(tenant, reader)


def test_write_only_without_dirty_keeps_the_only_copy() -> None:
    tenant = tenant_of(1, ONE)
    write(tenant, 0)
    tenant.release(tenant.acquire(0, write=1))
    assert granted(tenant, tenant.acquire(0, read=1))


def test_the_dead_leave_at_once_unwritten_and_are_born_again() -> None:
    tenant = tenant_of(1, ONE)
    write(tenant, 0)
    tenant.release(tenant.acquire(0, read=1), dead=1)
    assert tenant.scheduler.num_free_frames == 1
    assert record(tenant, 0).flags == ObjectFlags.BORN
    assert granted(tenant, tenant.acquire(0, read=1))
    assert tenant.disk.bytes_written == 0


def test_death_forgets_the_version_on_disk() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    lease = tenant.acquire(0, read=1)
    tenant.finish_all()
    tenant.release(lease, dead=1)
    assert record(tenant, 0).committed_offset == NO_EXTENT


def test_death_waits_for_other_readers_and_later_leases_wait_for_death() -> None:
    tenant = tenant_of(1, ONE)
    write(tenant, 0)
    first, second = tenant.acquire(0, read=1), tenant.acquire(0, read=1)
    tenant.release(first, dead=1)
    third = tenant.acquire(0, read=1)
    assert record(tenant, 0).flags & ObjectFlags.DYING
    assert not granted(tenant, third), "it would zero-fill what the second still reads"
    tenant.release(second)
    assert granted(tenant, third)


def test_death_waits_for_a_swap_out() -> None:
    tenant = tenant_of(2, ONE, TWO_KINDS)
    write(tenant, 0)
    tenant.release(tenant.acquire(1, write=3))
    lease = tenant.acquire(0, read=1)
    waiting = tenant.acquire(1, write=3)
    tenant.release(lease)
    lease = tenant.acquire(0, read=1)
    tenant.release(waiting)
    assert in_flight(tenant, write=True)
    assert granted(tenant, lease)
    tenant.release(lease, dead=1)
    tenant.finish_all()
    assert record(tenant, 0).flags == ObjectFlags.BORN
    assert record(tenant, 0).committed_offset == NO_EXTENT
    assert tenant.scheduler.num_free_frames == 2


def test_dead_wins_over_dirty() -> None:
    tenant = tenant_of(1, ONE)
    tenant.release(tenant.acquire(0, write=1), dirty=1, dead=1)
    assert record(tenant, 0).flags == ObjectFlags.BORN


def test_cancelled_leases_leave_nothing_behind_and_get_no_answer() -> None:
    tenant = tenant_of(2, ONE, ONE, TWO_KINDS)
    write(tenant, 0)
    holder = tenant.acquire(2, write=1)
    queued = tenant.acquire(2, read=3, write=3)
    tenant.release(queued)
    tenant.finish_all()
    tenant.release(holder)
    tenant.finish_all()
    assert not tenant.failures
    assert tenant.scheduler.num_leases == 0


def test_a_lease_cancelled_during_its_swap_in_leaves_the_object_resident() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    lease = tenant.acquire(0, read=1)
    assert in_flight(tenant, write=False)
    tenant.release(lease)
    tenant.finish_all()
    assert record(tenant, 0).state is ObjectState.RESIDENT
    assert granted(tenant, tenant.acquire(0, read=1))


def test_pinned_kinds_keep_their_frames_and_never_reach_the_disk() -> None:
    tenant = tenant_of(3, ChunkSpec((PAGE_BYTES, PAGE_BYTES), pinned_mask=1), ONE, ONE)
    write(tenant, 0, 1)
    frames = record(tenant, 0).frames
    for chunk in (1, 2, 1, 2):
        write(tenant, chunk)
        write(tenant, 0, 2)
    assert record(tenant, 0).frames == frames
    tenant.release(tenant.acquire(0, read=1), dead=1)
    assert record(tenant, 0).frames == frames
    lease = tenant.acquire(0, read=1, write=1)
    assert granted(tenant, lease)
    assert all(offset != record(tenant, 0).committed_offset for _, offset in tenant.disk.contents)


# Malformed entries.


@pytest.mark.parametrize(
    "entry",
    [
        {"opcode": 4},
        {"opcode": 255},
        {"opcode": Opcode.ECHO, "flags": 1},
        {"opcode": Opcode.ACQUIRE},
        {"opcode": Opcode.ACQUIRE, "read": 0b10},
        {"opcode": Opcode.ACQUIRE, "read": 1, "chunk": 2},
        {"opcode": Opcode.ACQUIRE, "read": 1, "chunk": 0xFFFF_FFFF},
        {"opcode": Opcode.ACQUIRE, "read": 256},
        {"opcode": Opcode.RELEASE, "arg": 99},
        {"opcode": Opcode.RELEASE, "arg": 1, "chunk": 1},
        {"opcode": Opcode.ACQUIRE, "read": 1, "dirty": 1},
        {"opcode": Opcode.ACQUIRE, "read": 1, "dead": 1},
        {"opcode": Opcode.RELEASE, "arg": 1, "write": 1},
        {"opcode": Opcode.RELEASE, "arg": 1, "read": 1},
        {"opcode": Opcode.RELEASE, "arg": 1, "dirty": 1},
        {"opcode": Opcode.RELEASE, "arg": 1, "dead": 0b10},
    ],
    ids=str,
)
def test_malformed_entries_are_refused_and_change_nothing(entry: dict[str, int]) -> None:
    tenant = tenant_of(2, ONE, ONE)
    lease = tenant.acquire(0, read=1)  # seq 1
    before = dict(tenant.memory.records)
    seq = tenant.send(**entry)
    assert tenant.failures[seq].status == Status.BAD_REQUEST
    assert tenant.memory.records == before
    assert tenant.scheduler.num_leases == 1
    assert tenant.scheduler.counters.rejected == 1
    tenant.release(lease)


def test_sequence_numbers_must_grow() -> None:
    scheduler = tenant_of(1, ONE).scheduler
    assert scheduler.on_sqe(Sqe(5, Opcode.ECHO, 0, 0, 0, 0, 0))[0].seq == 5  # type: ignore[union-attr]
    for seq in (5, 4):
        (answer,) = scheduler.on_sqe(Sqe(seq, Opcode.ACQUIRE, 0, 1, 0, 0, 0))
        assert (answer.seq, answer.status) == (seq, Status.BAD_REQUEST)  # type: ignore[union-attr]


def test_a_lease_not_granted_has_nothing_dirty_or_dead() -> None:
    tenant = tenant_of(1, ONE)
    tenant.acquire(0, write=1)
    waiting = tenant.acquire(0, write=1)
    for masks in ({"dirty": 1}, {"dead": 1}):
        seq = tenant.send(Opcode.RELEASE, chunk=0, arg=waiting, **masks)
        assert tenant.failures[seq].status == Status.BAD_REQUEST


def test_outstanding_leases_are_limited() -> None:
    tenant = tenant_of(1, ONE)
    leases = [tenant.acquire(0, read=1) for _ in range(4096)]
    assert tenant.failures.get(leases[-1]) is None
    assert tenant.failures[tenant.acquire(0, read=1)].status == Status.BAD_REQUEST


# Faults of the world.


def test_a_failed_swap_in_says_what_failed_and_leaves_the_object_on_disk() -> None:
    tenant = tenant_of(3, TWO_KINDS, ONE, TWO_KINDS)
    write(tenant, 0, 3)
    other = tenant.acquire(1, read=1)
    write(tenant, 2, 3)
    assert record(tenant, 0, 1).state is ObjectState.ABSENT
    first, second = tenant.acquire(0, read=2), tenant.acquire(0, read=3, write=1)
    (action,) = [action for action in in_flight(tenant, write=False) if action.kind == 1]
    tenant.finish(action.io_id, IoEnd(Status.INTEGRITY, 0, action.offset, 0xAAAA, 0xBBBB))
    for lease in (first, second):
        failure = tenant.failures[lease]
        assert (failure.status, failure.chunk, failure.kind, failure.file) == (Status.INTEGRITY, 0, 1, 0)
        assert (failure.offset, failure.expected, failure.actual) == (action.offset, 0xAAAA, 0xBBBB)
    tenant.finish_all()
    assert granted(tenant, other)
    again = tenant.acquire(0, read=3)
    tenant.finish_all()
    assert granted(tenant, again), "nothing is lost"
    assert tenant.scheduler.counters.io_errors == 1


def test_releasing_a_failed_lease_is_accepted_once() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    lease = tenant.acquire(0, read=1)
    (action,) = in_flight(tenant, write=False)
    tenant.finish(action.io_id, IoEnd(Status.IO_ERROR, errno.EIO, action.offset, PAGE_BYTES, 0))
    first = tenant.send(Opcode.RELEASE, chunk=0, arg=lease)
    second = tenant.send(Opcode.RELEASE, chunk=0, arg=lease)
    assert first not in tenant.failures
    assert tenant.failures[second].status == Status.BAD_REQUEST


def test_a_write_lease_behind_a_failed_swap_in_does_not_need_it() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    reader, writer = tenant.acquire(0, read=1), tenant.acquire(0, write=1)
    (action,) = in_flight(tenant, write=False)
    tenant.finish(action.io_id, IoEnd(Status.IO_ERROR, errno.EIO, action.offset, PAGE_BYTES, 0))
    assert reader in tenant.failures
    assert granted(tenant, writer)


def fail(tenant: ModelTenant, action: StartIo) -> None:
    tenant.finish(action.io_id, IoEnd(Status.IO_ERROR, errno.EIO, action.offset, PAGE_BYTES, 0))


def test_a_failed_lease_frees_its_siblings() -> None:
    """The kinds that did not fail: their frames for whoever is short, their objects for whoever stands behind."""
    tenant = tenant_of(4, TWO_KINDS, ChunkSpec((PAGE_BYTES,) * 4))
    write(tenant, 0, 3)
    write(tenant, 1, 15)
    assert record(tenant, 0).state is ObjectState.ABSENT
    failing, behind = tenant.acquire(0, read=3), tenant.acquire(0, read=1, write=1)
    short = tenant.acquire(1, write=15)
    tenant.finish(next(io.io_id for io in in_flight(tenant, write=False) if io.kind == 0))
    assert not granted(tenant, behind), "the first lease holds what is there already"
    fail(tenant, next(io for io in in_flight(tenant, write=False) if io.kind == 1))
    assert failing in tenant.failures
    assert granted(tenant, behind)
    assert not granted(tenant, short)
    tenant.release(behind)
    tenant.finish_all()
    assert granted(tenant, short)


def test_the_lease_behind_a_writer_is_spared_by_a_failed_swap_in() -> None:
    """It waits for what the writer will leave, not for what could not be read."""
    tenant = tenant_of(2, ONE, ONE, ONE)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    reader, writer, behind = tenant.acquire(0, read=1), tenant.acquire(0, write=1), tenant.acquire(0, read=1)
    (action,) = in_flight(tenant, write=False)
    fail(tenant, action)
    assert reader in tenant.failures
    assert granted(tenant, writer)
    assert behind not in tenant.failures
    tenant.release(writer, dirty=1)
    assert granted(tenant, behind)


def test_frames_of_an_overtaker_count_while_it_holds_them_and_no_longer() -> None:
    tenant = tenant_of(5, *[ONE] * 3, ChunkSpec((PAGE_BYTES,) * 4))
    for chunk in range(2):
        write(tenant, chunk)
    holder = tenant.acquire(2, write=1)
    large = tenant.acquire(3, write=15)
    for _ in range(3):
        first, second = tenant.acquire(0, read=1), tenant.acquire(1, read=1)
        assert granted(tenant, first), "5 frames less this one still hold the 4 that are waited for"
        assert not granted(tenant, second), "less two they do not"
        tenant.release(second)
        tenant.release(first)
    assert not granted(tenant, large)
    tenant.release(holder)
    tenant.finish_all()
    assert granted(tenant, large)


def test_a_failed_swap_out_loses_nothing_and_stops_the_tenant() -> None:
    tenant = tenant_of(2, TWO_KINDS, TWO_KINDS)
    write(tenant, 0, 1)
    held = tenant.acquire(0, read=2)
    waiting = tenant.acquire(1, write=3)
    (action,) = in_flight(tenant, write=True)
    tenant.finish(action.io_id, IoEnd(Status.IO_ERROR, errno.ENOSPC, action.offset, PAGE_BYTES, 0))
    assert tenant.failures[waiting].error_number == errno.ENOSPC
    assert record(tenant, 0).state is ObjectState.RESIDENT
    assert record(tenant, 0).flags & ObjectFlags.DIRTY
    assert record(tenant, 0).committed_offset == NO_EXTENT, "the version in place is torn"
    later = tenant.acquire(0, read=1)
    failure = tenant.failures[later]
    assert (failure.status, failure.error_number, failure.chunk) == (Status.IO_ERROR, errno.ENOSPC, 0)
    tenant.release(held)
    assert not tenant.disk.in_flight


# Budget and space.


def test_a_budget_too_small_names_the_smallest_that_works() -> None:
    specs = [ChunkSpec((PAGE_BYTES, 2 * PAGE_BYTES)), ChunkSpec((PAGE_BYTES, PAGE_BYTES), pinned_mask=2)]
    with pytest.raises(BudgetError) as caught:
        tenant_of(3, *specs)
    assert caught.value.smallest_bytes == 4 * PAGE_BYTES
    assert caught.value.budget_bytes == 3 * PAGE_BYTES
    tenant = tenant_of(4, *specs)
    for _ in range(3):
        for chunk in range(2):
            write(tenant, chunk, 3)
    assert not tenant.failures


def test_registering_is_all_or_nothing() -> None:
    scheduler = scheduler_of(ExtentAllocator(PAGE_BYTES))
    for specs, error in [
        ([ONE, ONE], SwapSpaceError),
        ([ONE] * 4, ValueError),
        ([ChunkSpec((PAGE_BYTES,) * 5)], BudgetError),
        ([ONE, ChunkSpec(())], ValueError),
        ([ONE, ChunkSpec((5 * PAGE_BYTES,))], ValueError),
        ([ONE, ChunkSpec((PAGE_BYTES,), pinned_mask=2)], ValueError),
        ([ONE, ChunkSpec((-1, 1))], ValueError),
    ]:
        with pytest.raises(error):
            pytest.fail(f"{specs}: {scheduler.register(specs)}")
        if error is not SwapSpaceError:  # files are grown when all else is known to be well
            with pytest.raises(error):
                scheduler.check(specs)
    scheduler.check([ONE])
    assert scheduler.register([ONE]) == range(1)
    assert scheduler.register([]) == range(0)


def test_a_chunk_without_kinds_takes_an_id_and_no_leases() -> None:
    tenant = tenant_of(1, ChunkSpec((0, 0)), ONE)
    assert tenant.failures[tenant.acquire(0, read=1)].status == Status.BAD_REQUEST
    write(tenant, 1)
    tenant.unregister(range(2))
    assert tenant.scheduler.num_free_frames == 1


def test_unregistering_gives_everything_back() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE)
    for chunk in range(3):
        write(tenant, chunk)
    lease = tenant.acquire(1, read=1)
    tenant.finish_all()
    with pytest.raises(ValueError, match="chunk 1 is leased"):
        tenant.unregister(range(3))
    assert tenant.memory.records[0].object_bytes
    tenant.release(lease)
    tenant.unregister(range(3))
    with pytest.raises(ValueError, match="not registered"):
        tenant.unregister(range(1))
    assert tenant.scheduler.num_free_frames == 2
    assert tenant.memory.records[0].object_bytes == 0, "the table says that there is no such object"
    assert tenant.scheduler.swap_bytes_needed([ONE] * 3) == [0]
    assert tenant.register([TWO_KINDS]) == range(1)


def test_an_access_does_not_look_at_all_that_is_clean_ahead_of_what_is_dirty() -> None:
    """All frames that are to be clean were looked at whenever anything ended: a thousand, where they are small."""

    def work(num_frames: int) -> int:
        tenant = tenant_of(num_frames, *[ONE] * 2 * num_frames, window=num_frames // 4)
        for chunk in (*range(2 * num_frames), 0):
            write(tenant, chunk)
        for chunk in range(1, num_frames):
            tenant.release(tenant.acquire(chunk, read=1))
            tenant.finish_all()
        write(tenant, num_frames - 1)

        def access() -> None:
            tenant.release(tenant.acquire(num_frames - 2, read=1))

        access()
        return lines_run(access)

    few, many = work(16), work(256)
    assert many <= 1.5 * few, f"{few} lines among 16 frames, {many} among 256"


def test_a_lease_that_waits_for_a_write_does_not_look_at_all_that_is_dirty() -> None:
    """Of a first pass everything is, and each lease that was short of frames passed over all of it."""

    def work(num_frames: int) -> int:
        tenant = tenant_of(num_frames, *[ONE] * (num_frames + 1))
        for chunk in range(num_frames):
            write(tenant, chunk)
        return lines_run(lambda: tenant.acquire(num_frames, write=1))

    few, many = work(128), work(512)
    assert many <= 1.5 * few, f"{few} lines among 128 frames, {many} among 512"


def test_unregistering_one_chunk_does_not_look_at_the_others() -> None:
    def work(num_chunks: int) -> int:
        tenant = tenant_of(4, *[TWO_KINDS] * num_chunks)
        return lines_run(lambda: tenant.unregister(range(1, 2)))

    few, many = work(64), work(1024)
    assert many <= 2 * few + 50, f"{few} lines with 64 chunks, {many} with 1024"


def test_budget_figures_follow_chunks_that_come_and_go() -> None:
    tenant = tenant_of(8, ONE, ChunkSpec((PAGE_BYTES,) * 3, pinned_mask=4), ChunkSpec((PAGE_BYTES,) * 5))
    with pytest.raises(BudgetError):
        tenant.register([ChunkSpec((PAGE_BYTES,) * 8)])
    tenant.unregister(range(1, 3))
    assert tenant.register([ChunkSpec((PAGE_BYTES,) * 8)]) == range(1, 2)
    write(tenant, 1, 255)
    assert not tenant.failures


def test_unregistering_waits_for_io_in_flight() -> None:
    tenant = tenant_of(2, ONE, TWO_KINDS)
    write(tenant, 0)
    tenant.release(tenant.acquire(1, write=3))
    assert in_flight(tenant, write=True)
    tenant.unregister(range(1))
    assert tenant.scheduler.swap_bytes_needed([ONE]) == [PAGE_BYTES], "its extent is still being written"
    assert tenant.failures[tenant.acquire(0, read=1)].status == Status.BAD_REQUEST
    tenant.finish_all()
    assert tenant.scheduler.swap_bytes_needed([ONE]) == [0]
    assert tenant.scheduler.num_free_frames == 2


# Passes and traces.


def test_a_trace_must_fit_the_chunks_and_traces_are_limited() -> None:
    tenant = tenant_of(1, ONE)
    good = [Access(0, 1, 0, 0)]
    for bad in ([Access(1, 1, 0, 0)], [Access(0, 2, 0, 0)], []):
        with pytest.raises(ValueError, match="trace"):
            tenant.set_trace(0, bad)
    with pytest.raises(ValueError, match="other sizes"):
        tenant.set_trace(0, Trace.from_accesses(good, Geometry(PAGE_BYTES, (TWO_KINDS,))))
    tenant.set_trace(0, Trace.from_accesses(good, tenant.scheduler.geometry))
    for trace_id in range(16):
        tenant.set_trace(trace_id, good)
    with pytest.raises(ValueError, match="more than 16"):
        tenant.set_trace(16, good)


def test_a_plan_made_elsewhere_is_adopted_unless_its_chunks_are_gone() -> None:
    tenant = tenant_of(2, ONE, ONE)
    made = plan(tenant.scheduler.plan_request([Access(1, 1, 0, 0)]))
    tenant.take(tenant.scheduler.adopt_plan(0, made))
    tenant.unregister(range(1, 2))
    with pytest.raises(ValueError, match="access 0"):
        tenant.scheduler.adopt_plan(0, made)


def test_a_trace_dies_with_its_chunks() -> None:
    tenant = tenant_of(2, ONE, ONE, window=2)
    tenant.mark(0)
    tenant.set_trace(0, [Access(0, 1, 0, 0), Access(1, 1, 0, 0)])
    tenant.unregister(range(1, 2))
    tenant.mark(0)
    for _ in range(3):
        write(tenant, 0)


# Drain.


def test_draining_refuses_new_leases_and_ends_when_io_does() -> None:
    tenant = tenant_of(2, ONE, ONE, ONE, TWO_KINDS, window=2)
    write(tenant, 0)
    evict(tenant, 0, range(3))
    held = tenant.acquire(0, read=1)
    queued = tenant.acquire(3, write=3)
    tenant.take(tenant.scheduler.drain())
    assert tenant.failures[queued].status == Status.SHUTTING_DOWN
    assert tenant.failures[tenant.acquire(0, read=1)].status == Status.SHUTTING_DOWN
    assert tenant.disk.in_flight
    assert tenant.scheduler.idle is False
    tenant.finish_all()
    assert [tenant.scheduler.idle, granted(tenant, held)] == [True, True], "what had its frames was still served"
    tenant.release(held)
    assert not tenant.disk.in_flight

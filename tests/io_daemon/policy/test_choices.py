"""What the policy chooses and counts, one choice a test."""

from __future__ import annotations

import copy
import errno
import gc
from collections.abc import Sequence

import pytest

from io_daemon.policy.actions import StartIo
from io_daemon.policy.counters import Counters
from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.protocol import KINDS_MAX, NO_EXTENT, PAGE_BYTES, Access, ChunkSpec, IoEnd, Status
from io_daemon.shared.states import ObjectFlags, ObjectState
from tests.support.simulator import ModelTenant, counted_since

ONE = ChunkSpec((PAGE_BYTES,))
TWO_KINDS = ChunkSpec((PAGE_BYTES, PAGE_BYTES))


def tenant_of(num_frames: int, *specs: ChunkSpec, window: int = 0) -> ModelTenant:
    tenant = ModelTenant(num_frames=num_frames, in_flight_frames_max=window)
    tenant.register(specs)
    return tenant


def use(tenant: ModelTenant, chunk: int, *, read: int = 0, write: int = 0, dead: int = 0) -> None:
    lease = tenant.acquire(chunk, read=read, write=write)
    tenant.finish_all()
    tenant.release(lease, dirty=write, dead=dead)


def resident(tenant: ModelTenant) -> list[int]:
    """Chunks whose first kind has frames."""
    records = tenant.memory.records
    return [
        object_id // KINDS_MAX
        for object_id, record in sorted(records.items())
        if object_id % KINDS_MAX == 0 and record.object_bytes and record.state is not ObjectState.ABSENT
    ]


def in_flight(tenant: ModelTenant) -> list[StartIo]:
    return [action for action, _ in tenant.disk.in_flight.values()]


def totals(tenant: ModelTenant) -> Counters:
    return tenant.scheduler.counters


def follow(tenant: ModelTenant, accesses: Sequence[Access], *, trace_id: int = 0) -> None:
    """From now on the accesses are a known trace, at its beginning."""
    tenant.set_trace(trace_id, accesses)
    tenant.mark(trace_id)


# Counting.


def test_waits_are_leases_that_were_short_of_frames() -> None:
    tenant = tenant_of(1, ONE, ONE)
    held = tenant.acquire(0, write=1)
    assert totals(tenant).waits == 0
    waiting = tenant.acquire(1, write=1)
    assert totals(tenant).waits == 1
    tenant.release(held)
    tenant.finish_all()
    tenant.release(waiting)
    use(tenant, 0, read=1)
    assert totals(tenant).waits == 1


def test_every_read_of_what_exists_is_a_hit_a_prefetch_hit_or_a_miss() -> None:
    tenant = tenant_of(2, TWO_KINDS, TWO_KINDS)
    use(tenant, 0, read=3)
    assert (totals(tenant).hits, totals(tenant).misses) == (0, 0), "it had no contents"
    use(tenant, 0, write=3)
    use(tenant, 0, write=3)
    assert totals(tenant).hits == 0, "nothing was read, though there were contents"
    use(tenant, 0, read=3)
    assert totals(tenant).hits == 2
    use(tenant, 1, write=3)
    assert totals(tenant).evictions == 2
    use(tenant, 0, read=1)
    found = totals(tenant)
    assert (found.hits, found.prefetch_hits, found.misses) == (2, 0, 1)
    assert (found.bytes_read[0], found.bytes_read[1]) == (PAGE_BYTES, 0)
    assert found.bytes_written[0] == found.bytes_written[1] >= PAGE_BYTES


# Traces.


def test_a_trace_outlives_chunks_that_it_does_not_name() -> None:
    tenant = tenant_of(8, *[ONE] * 5, window=2)
    for trace_id, chunks in ((0, (0, 3)), (1, (1, 2)), (2, (3, 4))):
        tenant.set_trace(trace_id, [Access(chunk, 1, 0, 0) for chunk in chunks])
    tenant.unregister(range(1, 3))
    assert sorted(tenant.scheduler._plans) == [0, 2]
    tenant.unregister(range(4, 5))
    assert sorted(tenant.scheduler._plans) == [0]


def test_a_plan_is_followed_from_the_mark_that_names_it() -> None:
    tenant = tenant_of(3, *[ONE] * 6, window=2)
    for chunk in range(6):
        use(tenant, chunk, write=1)
    tenant.finish_all()
    scan = [Access(chunk, 1, 0, 0) for chunk in range(6)]
    for trace_id in (4, 5):
        tenant.set_trace(trace_id, scan)
    assert not in_flight(tenant)
    tenant.mark(3)
    assert not in_flight(tenant)
    tenant.mark(5)
    assert in_flight(tenant)


# Prefetch.


def written_chunks(count: int, num_frames: int, window: int) -> ModelTenant:
    """All on disk or clean in memory."""
    tenant = tenant_of(num_frames, *[ONE] * count, window=window)
    for chunk in range(count):
        use(tenant, chunk, write=1)
    for chunk in range(count):
        use(tenant, chunk, read=1)
    tenant.finish_all()
    return tenant


@pytest.mark.parametrize("window", [1, 2, 3])
def test_prefetch_stays_within_its_window(window: int) -> None:
    tenant = written_chunks(12, 6, window)
    follow(tenant, [Access(chunk, 1, 0, 0) for chunk in range(12)])
    assert len(in_flight(tenant)) <= window
    tenant.finish_all()
    for chunk in range(12):
        lease = tenant.acquire(chunk, read=1)
        reads = [action for action in in_flight(tenant) if not action.write]
        assert len(reads) <= window + 1
        tenant.finish_all()
        tenant.release(lease)
    tenant.finish_all()
    assert totals(tenant).prefetch_hits >= 12 - 6


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_prefetch_uses_the_whole_window_where_frames_are_free(window: int) -> None:
    tenant = tenant_of(8, *[ONE] * 8, ChunkSpec((PAGE_BYTES,) * 8), window=window)
    for chunk in range(8):
        use(tenant, chunk, write=1)
    use(tenant, 8, write=255, dead=255)
    assert tenant.scheduler.num_free_frames == 8
    follow(tenant, [Access(chunk, 1, 0, 0) for chunk in range(8)])
    assert [action.object_id // KINDS_MAX for action in in_flight(tenant)] == list(range(window))
    assert not any(action.demand for action in in_flight(tenant))


def test_prefetched_contents_that_nobody_has_asked_for_count_once() -> None:
    tenant = written_chunks(8, 4, 2)
    follow(tenant, [Access(chunk, 1, 0, 0) for chunk in range(8)])
    tenant.finish_all()
    first = next(chunk for chunk in range(8) if _is_prefetched(tenant, chunk))
    for chunk in range(first):
        use(tenant, chunk, read=1)
    before = copy.deepcopy(totals(tenant))
    held = tenant.acquire(first, read=1)
    tenant.finish_all()
    once = counted_since(before, totals(tenant))
    use(tenant, first, read=1)  # it has not left meanwhile
    again = counted_since(before, totals(tenant))
    tenant.release(held)
    assert (once.prefetch_hits, once.hits) == (1, 0)
    assert (again.prefetch_hits, again.hits) == (1, 1), "the second time it is an ordinary hit"
    assert not _is_prefetched(tenant, first)


def _is_prefetched(tenant: ModelTenant, chunk: int) -> bool:
    return bool(tenant.memory.records[chunk * KINDS_MAX].flags & ObjectFlags.PREFETCHED)


def test_nothing_is_prefetched_while_a_lease_is_short_of_frames() -> None:
    tenant = written_chunks(8, 3, 2)
    held = [tenant.acquire(chunk, read=1) for chunk in (5, 6)]
    tenant.finish_all()
    tenant.set_trace(0, [Access(chunk, 1, 0, 0) for chunk in range(8)])
    short = [tenant.acquire(chunk, read=1) for chunk in (4, 3)]
    tenant.mark(0)
    assert all(action.demand for action in in_flight(tenant) if not action.write)
    for lease in (*held, *short):
        tenant.finish_all()
        tenant.release(lease)


# What leaves.


def test_the_dead_leave_no_traffic() -> None:
    tenant = tenant_of(2, *[ONE] * 4)
    for chunk in range(4):
        use(tenant, chunk, write=1, dead=1)
    found = totals(tenant)
    assert (sum(found.bytes_written), found.evictions, tenant.scheduler.num_free_frames) == (0, 0, 2)


def test_resident_bytes_are_counted_by_kind() -> None:
    tenant = tenant_of(6, ChunkSpec((PAGE_BYTES, 2 * PAGE_BYTES)), ChunkSpec((PAGE_BYTES, 3 * PAGE_BYTES)))
    use(tenant, 0, write=3)
    assert tenant.scheduler.resident_bytes[:3] == [PAGE_BYTES, 2 * PAGE_BYTES, 0]
    use(tenant, 1, write=1)
    assert tenant.scheduler.resident_bytes[:3] == [2 * PAGE_BYTES, 2 * PAGE_BYTES, 0]
    use(tenant, 0, read=2, dead=2)
    assert tenant.scheduler.resident_bytes[:3] == [2 * PAGE_BYTES, 0, 0]
    tenant.unregister(range(2))
    assert sum(tenant.scheduler.resident_bytes) == 0


def test_a_swap_out_in_place_leaves_no_version_on_disk_until_it_has_succeeded() -> None:
    """Also not the one of before, over which it is written."""
    tenant = tenant_of(2, ONE, TWO_KINDS)
    use(tenant, 0, write=1)
    use(tenant, 1, write=3)
    use(tenant, 0, read=1)
    record = tenant.memory.records
    place = record[0].committed_offset
    assert place != NO_EXTENT
    use(tenant, 0, write=1)
    waiting = tenant.acquire(1, write=3)
    (action,) = [action for action in in_flight(tenant) if action.object_id == 0]
    assert action.write
    assert (record[0].committed_offset, record[0].pending_offset) == (NO_EXTENT, place)
    tenant.finish(action.io_id, IoEnd(Status.IO_ERROR, errno.EIO, action.offset, PAGE_BYTES, 0))
    assert (record[0].committed_offset, record[0].pending_offset) == (NO_EXTENT, NO_EXTENT)
    assert waiting in tenant.failures


def test_a_cancelled_lease_lets_go_of_what_it_held_and_of_nothing_else() -> None:
    """It had frames for one of its two objects; later neither stays for ever."""
    tenant = tenant_of(2, ONE, ONE, TWO_KINDS)
    holder = tenant.acquire(0, write=1)
    cancelled = tenant.acquire(2, write=3)
    tenant.release(cancelled)
    tenant.release(holder)
    use(tenant, 2, write=3)
    leases = [tenant.acquire(chunk, write=1) for chunk in (0, 1)]
    tenant.finish_all()
    assert [tenant.leases[lease].granted for lease in leases] == [True, True]


# The order of things.


def num_swap_objects() -> int:
    gc.collect()
    return sum(type(each) is SwapObject for each in gc.get_objects())


def test_a_dismantled_tenant_holds_nothing() -> None:
    before = num_swap_objects()
    tenant = written_chunks(4, 3, 1)
    tenant.set_trace(0, [Access(0, 1, 0, 0)])
    tenant.acquire(0, read=1)
    tenant.scheduler.dismantle()
    assert tenant.scheduler.num_leases == 0
    assert tenant.scheduler.geometry.specs == ()
    assert num_swap_objects() == before


def test_sizes_that_make_no_sense_are_refused() -> None:
    for num_frames, window in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ValueError, match="num_frames"):
            ModelTenant(num_frames=num_frames, in_flight_frames_max=window)
    ModelTenant(num_frames=1, in_flight_frames_max=0)

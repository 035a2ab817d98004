"""Order between tenants and within one."""

from __future__ import annotations

import random
from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from io_daemon.policy.actions import StartIo
from io_daemon.policy.fair_queue import LINGER, SHARES, FairQueue
from io_daemon.shared.protocol import PAGE_BYTES, Access, ChunkSpec
from tests.support.simulator import DiskModel, Pass, Simulator
from tests.support.step_traces import cyclic_scan, fill

QUANTUM = 1 << 20


def io(io_id: int, num_bytes: int = 4096, *, write: bool = False, demand: bool = False) -> StartIo:
    return StartIo(io_id, write, 0, 0, 0, 0, 0, num_bytes, 0, False, demand)


def drain(queue: FairQueue[StartIo]) -> list[tuple[int, StartIo]]:
    popped = []
    while (each := queue.pop()) is not None:
        popped.append(each)
        queue.complete(each[1])
    return popped


def test_reads_on_demand_go_before_writes_on_demand_before_prefetch_before_write_behind() -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 30)
    queue.push(0, io(1, write=True))
    queue.push(0, io(2))
    queue.push(0, io(3, write=True, demand=True))
    queue.push(0, io(4))
    queue.push(0, io(5, demand=True))
    queue.push(0, io(6, write=True))
    assert [action.io_id for _, action in drain(queue)] == [5, 3, 2, 4, 1, 6]


def test_bytes_in_flight_are_bounded_and_one_is_always_allowed() -> None:
    queue: FairQueue[StartIo] = FairQueue(10_000)
    for io_id in range(3):
        queue.push(0, io(io_id, 4096))
    queue.push(0, io(9, 50_000))
    first, second, none = (queue.pop() for _ in range(3))
    assert first is not None
    assert second is not None
    assert none is None
    assert queue.in_flight_bytes == 8192
    queue.complete(first[1])
    third = queue.pop()
    assert third is not None
    assert third[1].io_id == 2
    queue.complete(second[1])
    assert queue.pop() is None, "too large beside another"
    queue.complete(third[1])
    last = queue.pop()
    assert last is not None
    assert last[1].num_bytes == 50_000
    with pytest.raises(ValueError, match="completed"):
        queue.complete(io(9, 50_001))


@given(
    st.lists(st.integers(QUANTUM // 8, 3 * QUANTUM), min_size=2, max_size=4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_tenants_with_a_backlog_of_one_urgency_get_equal_bytes(sizes: list[int], behind: bool, seed: int) -> None:
    """However large each one's requests are, and whatever they are for."""
    rng = random.Random(seed)
    queue: FairQueue[StartIo] = FairQueue(1 << 40, quantum_bytes=QUANTUM)
    total = 20 * QUANTUM
    for tenant, size in enumerate(sizes):
        for _ in range(total // size + 1):
            demand = not behind and rng.random() < 0.5
            queue.push(tenant, io(0, size, write=behind or (demand and rng.random() < 0.5), demand=demand))
    served = dict.fromkeys(range(len(sizes)), 0)
    while min(served.values()) < total - 4 * QUANTUM:
        popped = queue.pop()
        assert popped is not None
        served[popped[0]] += popped[1].num_bytes
        spread = max(served.values()) - min(served.values())
        assert spread <= 2 * QUANTUM + 2 * max(sizes)


def test_a_small_tenant_does_not_wait_behind_a_large_one() -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 40, quantum_bytes=QUANTUM)
    for io_id in range(1000):
        queue.push(0, io(io_id, QUANTUM))
    queue.push(1, io(5000, 4096))
    order = [tenant for tenant, _ in (queue.pop() or (9, None) for _ in range(4))]
    assert 1 in order


def test_a_tenant_that_leaves_takes_its_backlog_along() -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 30)
    for io_id in range(6):
        queue.push(io_id % 2, io(io_id, demand=io_id < 2))
    assert [action.io_id for action in queue.remove(0)] == [0, 2, 4]
    assert queue.remove(0) == []
    assert len(queue) == 3
    assert {tenant for tenant, _ in drain(queue)} == {1}
    assert len(queue) == 0


def test_an_idle_tenant_saves_up_nothing() -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 40, quantum_bytes=QUANTUM)
    queue.push(0, io(0, QUANTUM))
    assert len(drain(queue)) == 1
    for io_id in range(40):
        queue.push(0, io(io_id, QUANTUM))
        queue.push(1, io(io_id, QUANTUM))
    first = [popped[0] for popped in (queue.pop() for _ in range(20)) if popped is not None]
    assert 8 <= first.count(0) <= 12


@pytest.mark.parametrize(
    ("demand", "write", "first"),
    [(True, False, 1), (True, True, 1), (False, False, 1), (False, True, 0)],
    ids=["demand read", "demand write", "prefetch", "write-behind"],
)
def test_nobodys_write_behind_goes_before_what_others_wait_for(demand: bool, write: bool, first: int) -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 40, quantum_bytes=QUANTUM)
    for io_id in range(10):
        queue.push(0, io(io_id, QUANTUM, write=True))
    for io_id in range(5):
        queue.push(1, io(io_id, QUANTUM, demand=demand, write=write))
    tenants = [tenant for tenant, _ in drain(queue)]
    assert tenants[0] == first
    if first:
        assert tenants == [1] * 5 + [0] * 10


PUSHES = st.lists(
    st.tuples(st.integers(0, 3), st.booleans(), st.booleans(), st.integers(1, 3 * QUANTUM), st.booleans()),
    min_size=1,
    max_size=60,
)


@given(PUSHES, st.integers(QUANTUM, 200 * QUANTUM))
@settings(deadline=None)
def test_every_request_starts_once_within_the_limits(
    pushes: list[tuple[int, bool, bool, int, bool]], in_flight_bytes_max: int
) -> None:
    """Whatever comes: the maximum holds, write-behind starts only when nothing more urgent could, nothing is lost."""
    queue: FairQueue[StartIo] = FairQueue(in_flight_bytes_max, quantum_bytes=QUANTUM)
    waiting: dict[int, tuple[int, StartIo]] = {}
    in_flight: list[tuple[int, StartIo]] = []

    def start_all() -> None:
        while (popped := queue.pop()) is not None:
            in_flight.append(popped)
            tenant, action = popped
            assert waiting.pop(action.io_id) == (tenant, action)
            total = sum(each.num_bytes for _, each in in_flight)
            assert total == queue.in_flight_bytes
            assert total <= in_flight_bytes_max or len(in_flight) == 1
            if action.write and not action.demand:
                assert not any(each.demand and not each.write and total == action.num_bytes
                               for _, each in waiting.values())  # fmt: skip

    for io_id, (tenant, write, demand, num_bytes, end_one) in enumerate(pushes):
        action = io(io_id, num_bytes, write=write, demand=demand)
        waiting[io_id] = (tenant, action)
        queue.push(tenant, action)
        start_all()
        if end_one and in_flight:
            queue.complete(in_flight.pop(0)[1])
            start_all()
    while in_flight:
        queue.complete(in_flight.pop(0)[1])
        start_all()
    assert not waiting
    assert len(queue) == queue.in_flight_bytes == 0


def test_hurried_write_behind_is_on_demand() -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 40, quantum_bytes=QUANTUM)
    queue.push(0, io(1, QUANTUM, write=True))
    queue.push(1, io(2, QUANTUM, write=True))
    for io_id in range(3, 9):
        queue.push(2, io(io_id, QUANTUM, demand=True))
    queue.hurry(1)
    queue.hurry(7)  # it has nothing
    order = [action.io_id for _, action in drain(queue)]
    assert order.index(2) <= 2, "it takes its turn with the readers"
    assert order[-1] == 1
    assert len(order) == 8


def in_flight_of(queue: FairQueue[StartIo], tenant: int) -> list[tuple[int, StartIo]]:
    popped = []
    while (each := queue.pop()) is not None:
        popped.append(each)
    return [each for each in popped if each[0] == tenant]


@pytest.mark.parametrize("demand", [False, True])
def test_writes_in_flight_are_few_while_another_tenant_reads_on_demand(demand: bool) -> None:
    most = 64 * QUANTUM
    queue: FairQueue[StartIo] = FairQueue(most, quantum_bytes=QUANTUM)
    reading = io(0, QUANTUM, demand=True)
    queue.push(0, reading)
    assert queue.pop() == (0, reading)
    queue.complete(reading)
    started = 0
    for io_id in range(1, 1001):
        queue.push(1, io(io_id, QUANTUM, write=True, demand=demand))
    writing = in_flight_of(queue, 1)
    assert len(writing) == 64 // SHARES
    while len(writing) <= 64 // SHARES:
        queue.complete(writing.pop(0)[1])
        started += 1
        writing += in_flight_of(queue, 1)
    assert started + 64 // SHARES == LINGER * 64, "it seems to read no more when so much has been started since"
    assert len(writing) == 64


@pytest.mark.parametrize(("demand", "write"), [(False, False), (False, True), (True, True)])
def test_the_window_is_whole_while_nobody_reads_on_demand(demand: bool, write: bool) -> None:
    queue: FairQueue[StartIo] = FairQueue(64 * QUANTUM, quantum_bytes=QUANTUM)
    for io_id in range(200):
        queue.push(io_id % 2, io(io_id, QUANTUM, write=write, demand=demand))
    assert len(in_flight_of(queue, 0)) == 32
    assert queue.in_flight_bytes == 64 * QUANTUM


def depths(num_each: tuple[int, int]) -> list[int]:
    """Bytes in flight, in quanta, as a queue goes on in which each tenant always has so many reads on demand."""
    queue: FairQueue[StartIo] = FairQueue(64 * QUANTUM, quantum_bytes=QUANTUM)
    started: deque[tuple[int, StartIo]] = deque()
    found: list[int] = []
    waiting = [0, 0]
    for io_id in range(2000):
        for tenant in (0, 1):
            while waiting[tenant] < num_each[tenant]:
                queue.push(tenant, io(io_id, QUANTUM, demand=True))
                waiting[tenant] += 1
        while (each := queue.pop()) is not None:
            started.append(each)
        found.append(queue.in_flight_bytes // QUANTUM)
        tenant, ended = started.popleft()
        waiting[tenant] -= 1
        queue.complete(ended)
    return found


def test_tenants_that_ask_for_as_much_as_each_other_have_the_drives_depth() -> None:
    """Two ranks of a job that both read on demand: each has its share of the turns, so nothing need be held back."""
    assert min(depths((64, 64))[100:]) == 64


def test_a_tenant_that_has_less_than_its_share_is_not_held_up_by_the_others_depth() -> None:
    assert max(depths((64, 1))[100:]) <= 2 * 64 // SHARES


def test_a_tenant_alone_has_the_whole_queue() -> None:
    queue: FairQueue[StartIo] = FairQueue(64 * QUANTUM, quantum_bytes=QUANTUM)
    for io_id in range(100):
        queue.push(0, io(io_id, QUANTUM, write=io_id % 2 == 0, demand=True))
    assert len(in_flight_of(queue, 0)) == 64
    queue.push(1, io(200, QUANTUM, demand=True))
    assert queue.remove(1) != []
    for _ in range(60):
        queue.complete(io(0, QUANTUM))
    assert len(in_flight_of(queue, 0)) == 36, "who has left reads no more"


def test_a_newcomer_is_not_held_up_by_what_a_tenant_that_is_done_has_in_flight() -> None:
    """Who has asked for nothing lately is not at work: nobody needs a small window to have a share beside it."""
    queue: FairQueue[StartIo] = FairQueue(64 * QUANTUM, quantum_bytes=QUANTUM)
    for io_id in range(64 * (LINGER + 2)):
        queue.push(0, io(io_id, QUANTUM))
    writing = in_flight_of(queue, 0)
    for _ in range(64 * (LINGER + 1)):
        queue.complete(writing.pop(0)[1])
        writing += in_flight_of(queue, 0)
    queue.complete(writing.pop(0)[1])
    queue.push(1, io(9999, QUANTUM, demand=True))
    assert in_flight_of(queue, 1) == [(1, io(9999, QUANTUM, demand=True))]


DRIVE = DiskModel(
    read_bytes_per_us=1000.0,
    write_bytes_per_us=1000.0,
    latency_us=PAGE_BYTES / 1000.0,
    jitter=0.5,
    in_flight_bytes_max=64 * PAGE_BYTES,
    one_channel=True,
)
"""One request at a time gets about half of its bandwidth."""


def small_rank_beside(accesses: list[Access] | None, leases: int = 32) -> tuple[float, float]:
    """(time of its passes, p99 of its waits) for a rank that reads what is never there, one lease at a time, beside
    another that goes over ``accesses`` with ``leases`` open; alone if there are none."""
    simulator = Simulator(11, DRIVE)
    chunks = range(64)
    small = simulator.add_rank(
        {"num_frames": 4, "in_flight_frames_max": 0},
        passes=[Pass(accesses=fill(chunks, mask=1)), *[Pass(accesses=cyclic_scan(chunks))] * 6],
        leases_ahead=0,
    )
    small.tenant.register([ChunkSpec((PAGE_BYTES,))] * len(chunks))
    if accesses is not None:
        large = simulator.add_rank(
            {"num_frames": 96, "in_flight_frames_max": 16},
            passes=[Pass(accesses=accesses)] * 1000,
            leases_ahead=leases - 1,
        )
        large.tenant.register([ChunkSpec((PAGE_BYTES,))] * 512)
    simulator.run(until=small)
    waits = sorted(small.waits_us[len(chunks) :])
    return small.pass_ends_us[-1] - small.pass_ends_us[0], waits[len(waits) * 99 // 100]


@pytest.mark.parametrize("read", [0, 1], ids=["write", "update"])
def test_a_small_tenant_beside_a_writer_keeps_its_pace(read: int) -> None:
    alone_us, alone_p99_us = small_rank_beside(None)
    beside_us, beside_p99_us = small_rank_beside([Access(chunk, read, 1, 0) for chunk in range(512)])
    print(f"bandwidth kept {alone_us / beside_us:.2f}, p99 stretched {beside_p99_us / alone_p99_us:.1f} times")
    assert alone_us / beside_us >= (0.35 if read else 0.5)
    assert beside_p99_us / alone_p99_us <= 3.0


def writer_us(*, beside_reader: bool) -> float:
    """How long a rank takes for its writes, which are written behind for the most part, while another reads."""
    simulator = Simulator(12, DRIVE)
    chunks = range(256)
    options = {"num_frames": 64, "in_flight_frames_max": 16}
    writes = [Access(chunk, 0, 1, 0) for chunk in chunks]
    writer = simulator.add_rank(options, passes=[Pass(accesses=writes)] * 4, leases_ahead=4, compute_us=2.0)
    writer.tenant.register([ChunkSpec((PAGE_BYTES,))] * len(chunks))
    if beside_reader:
        passes = [Pass(accesses=fill(chunks, mask=1)), *[Pass(accesses=cyclic_scan(chunks))] * 1000]
        reader = simulator.add_rank(options, passes=passes, leases_ahead=31)
        reader.tenant.register([ChunkSpec((PAGE_BYTES,))] * len(chunks))
    simulator.run(until=writer)
    return writer.pass_ends_us[-1] - writer.pass_ends_us[0]


def test_a_writer_beside_a_reader_that_never_rests_is_not_starved() -> None:
    """Its write-behind is passed over until its leases wait for it, and then takes turns with the reads."""
    kept = writer_us(beside_reader=False) / writer_us(beside_reader=True)
    print(f"the writer kept {kept:.2f}")
    assert kept >= 0.33


@pytest.mark.parametrize(("in_flight", "quantum"), [(0, 1), (1, 0), (-1, 1)])
def test_limits_are_positive(in_flight: int, quantum: int) -> None:
    with pytest.raises(ValueError, match="in_flight_bytes_max"):
        FairQueue(in_flight, quantum_bytes=quantum)

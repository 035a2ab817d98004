"""Order between tenants and within one."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from io_daemon.policy.actions import StartIo
from io_daemon.policy.fair_queue import FairQueue

QUANTUM = 1 << 20


def io(io_id: int, num_bytes: int = 4096, *, write: bool = False, demand: bool = False) -> StartIo:
    return StartIo(io_id, write, 0, 0, 0, 0, 0, num_bytes, 0, False, demand)


def drain(queue: FairQueue[StartIo]) -> list[tuple[int, StartIo]]:
    popped = []
    while (each := queue.pop()) is not None:
        popped.append(each)
        queue.complete(each[1].num_bytes)
    return popped


def test_demand_goes_before_prefetch_before_write_behind() -> None:
    queue: FairQueue[StartIo] = FairQueue(1 << 30)
    queue.push(0, io(1, write=True))
    queue.push(0, io(2))
    queue.push(0, io(3, write=True, demand=True))
    queue.push(0, io(4))
    queue.push(0, io(5, demand=True))
    queue.push(0, io(6, write=True))
    assert [action.io_id for _, action in drain(queue)] == [3, 5, 2, 4, 1, 6]


def test_bytes_in_flight_are_bounded_and_one_is_always_allowed() -> None:
    queue: FairQueue[StartIo] = FairQueue(10_000)
    for io_id in range(3):
        queue.push(0, io(io_id, 4096))
    queue.push(0, io(9, 50_000))
    assert [queue.pop() is not None for _ in range(3)] == [True, True, False]
    assert queue.in_flight_bytes == 8192
    queue.complete(4096)
    third = queue.pop()
    assert third is not None
    assert third[1].io_id == 2
    queue.complete(4096)
    assert queue.pop() is None, "too large beside another"
    queue.complete(4096)
    last = queue.pop()
    assert last is not None
    assert last[1].num_bytes == 50_000
    with pytest.raises(ValueError, match="completed"):
        queue.complete(50_001)


@given(
    st.lists(st.integers(QUANTUM // 8, 3 * QUANTUM), min_size=2, max_size=4),
    st.integers(0, 2**32 - 1),
)
@settings(deadline=None)
def test_tenants_with_a_backlog_get_equal_bytes(sizes: list[int], seed: int) -> None:
    """However large each one's requests are, and whichever class they are in."""
    rng = random.Random(seed)
    queue: FairQueue[StartIo] = FairQueue(1 << 40, quantum_bytes=QUANTUM)
    total = 20 * QUANTUM
    for tenant, size in enumerate(sizes):
        for _ in range(total // size + 1):
            queue.push(tenant, io(0, size, write=rng.random() < 0.5, demand=rng.random() < 0.5))
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


@pytest.mark.parametrize(("in_flight", "quantum"), [(0, 1), (1, 0), (-1, 1)])
def test_limits_are_positive(in_flight: int, quantum: int) -> None:
    with pytest.raises(ValueError, match="in_flight_bytes_max"):
        FairQueue(in_flight, quantum_bytes=quantum)

"""The extent allocator against a bitmap."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from io_daemon.policy.extents import ExtentAllocator
from io_daemon.shared.protocol import PAGE_BYTES
from tests.support.work import lines_run


def test_extents_are_aligned_disjoint_and_coalesce() -> None:
    allocator = ExtentAllocator(4 * PAGE_BYTES)
    first, second = allocator.allocate(1), allocator.allocate(PAGE_BYTES + 1)
    assert (first, second) == (0, PAGE_BYTES)
    assert allocator.free_bytes == PAGE_BYTES
    assert allocator.allocate(2 * PAGE_BYTES) is None
    allocator.free(0, 1)
    allocator.free(PAGE_BYTES, PAGE_BYTES + 1)
    assert allocator.extents() == [(0, 4 * PAGE_BYTES)]


def test_growth_joins_the_free_tail() -> None:
    allocator = ExtentAllocator(PAGE_BYTES)
    allocator.grow(PAGE_BYTES)
    assert allocator.allocate(2 * PAGE_BYTES) == 0


def test_a_new_version_can_be_placed_before_the_old_one_goes() -> None:
    allocator = ExtentAllocator(3 * PAGE_BYTES)
    old = allocator.allocate(PAGE_BYTES)
    new = allocator.allocate(PAGE_BYTES)
    assert old is not None
    assert new not in (None, old)
    allocator.free(old, PAGE_BYTES)
    assert allocator.allocate(PAGE_BYTES) == old


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, PAGE_BYTES), (PAGE_BYTES, 2 * PAGE_BYTES), (1, 1), (-PAGE_BYTES, 1), (8 * PAGE_BYTES, 1), (0, 0)],
)
def test_what_was_not_handed_out_cannot_be_freed(offset: int, num_bytes: int) -> None:
    allocator = ExtentAllocator(4 * PAGE_BYTES)
    assert allocator.allocate(2 * PAGE_BYTES) == 0
    allocator.free(0, PAGE_BYTES)
    before = allocator.extents()
    with pytest.raises(ValueError, match="extent"):
        allocator.free(offset, num_bytes)
    assert allocator.extents() == before


@pytest.mark.parametrize("capacity", [-PAGE_BYTES, 1])
def test_capacity_is_whole_granules(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        ExtentAllocator(capacity)


@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "grow", "shortfall"]), st.integers(1, 6)), max_size=60),
)
@settings(deadline=None)
def test_against_a_bitmap(capacity: int, steps: list[tuple[str, int]]) -> None:
    allocator = ExtentAllocator(capacity, granule_bytes=1)
    used = [False] * capacity
    held: list[tuple[int, int]] = []
    for verb, number in steps:
        if verb == "allocate":
            offset = allocator.allocate(number)
            runs = [i for i in range(len(used) - number + 1) if not any(used[i : i + number])]
            assert offset == (runs[0] if runs else None)  # first fit
            if offset is not None:
                used[offset : offset + number] = [True] * number
                held.append((offset, number))
        elif verb == "free" and held:
            offset, length = held.pop(number % len(held))
            allocator.free(offset, length)
            used[offset : offset + length] = [False] * length
        elif verb == "grow":
            allocator.grow(number)
            used += [False] * number
        elif verb == "shortfall":
            before = allocator.extents()
            sizes = [number, 1, number]
            shortfall = allocator.shortfall_bytes(sizes)
            assert allocator.extents() == before
            assert shortfall == next(n for n in range(99) if _fits(used + [False] * n, sizes))
        assert allocator.free_bytes == used.count(False)
        assert allocator.capacity_bytes == len(used)
        free = {i for offset, length in allocator.extents() for i in range(offset, offset + length)}
        assert free == {i for i, taken in enumerate(used) if not taken}


def _fits(used: list[bool], sizes: list[int]) -> bool:
    used = list(used)
    for size in sizes:
        runs = [i for i in range(len(used) - size + 1) if not any(used[i : i + size])]
        if not runs:
            return False
        used[runs[0] : runs[0] + size] = [True] * size
    return True


def with_holes(num_holes: int) -> ExtentAllocator:
    """Every second page is free, and a large extent at the end."""
    allocator = ExtentAllocator((2 * num_holes + 64) * PAGE_BYTES)
    offsets = [allocator.allocate(PAGE_BYTES) for _ in range(2 * num_holes)]
    for offset in offsets[::2]:
        assert offset is not None
        allocator.free(offset, PAGE_BYTES)
    return allocator


@pytest.mark.parametrize("verb", ["allocate a large one", "allocate a small one", "free one", "shortfall"])
def test_work_hardly_grows_with_the_number_of_holes(verb: str) -> None:
    """Of one operation, in lines of code run, amid 16 times as many holes."""

    def work(num_holes: int) -> int:
        allocator = with_holes(num_holes)
        return lines_run(
            {
                "allocate a large one": lambda: allocator.allocate(8 * PAGE_BYTES),
                "allocate a small one": lambda: allocator.allocate(PAGE_BYTES),
                "free one": lambda: allocator.free((num_holes // 2 * 2 + 1) * PAGE_BYTES, PAGE_BYTES),
                "shortfall": lambda: allocator.shortfall_bytes([PAGE_BYTES, 100 * PAGE_BYTES]),
            }[verb]
        )

    few, many = work(512), work(8192)
    assert many <= 3 * few + 50, f"{few} lines among 512 holes, {many} among 8192"

"""Lost, stale, misplaced, torn and flipped bytes are all found, and told apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from io_daemon.bench.pattern import STAMP_BYTES, Pattern

PAGE_BYTES = 4096
BS, NUM_SLOTS, NUM_BLOCKS = 3 * PAGE_BYTES, 6, 12


class Disk:
    """Blocks in memory, written through a pattern."""

    def __init__(self, seed: int = 1) -> None:
        self.slots = np.zeros((NUM_SLOTS, BS), np.uint8)
        self.pattern = Pattern(self.slots, NUM_BLOCKS, seed)
        self.blocks = np.zeros((NUM_BLOCKS, BS), np.uint8)

    def write(self, *blocks: int, first_slot: int = 0) -> None:
        chosen = np.array(blocks, np.uint64)
        self.blocks[chosen] = self.slots[first_slot : first_slot + len(blocks)]
        stamps = self.pattern.stamps(chosen, np.ones(len(blocks), np.bool_))
        for page in range(0, BS, PAGE_BYTES):
            self.blocks[chosen, page : page + STAMP_BYTES] = stamps

    def faults(self, *blocks: int) -> list[tuple[int, str]]:
        chosen = np.array(blocks, np.uint64)
        return self.pattern.find_faults(chosen, self.blocks[chosen])


@pytest.fixture
def disk() -> Disk:
    disk = Disk()
    for begin in range(0, NUM_BLOCKS, 3):
        disk.write(begin, begin + 1, begin + 2, first_slot=begin % NUM_SLOTS)
    disk.write(4, 7)
    return disk


def test_what_was_written_is_well(disk: Disk) -> None:
    assert disk.faults(*range(NUM_BLOCKS)) == []


def flip(blocks: NDArray[np.uint8]) -> None:
    blocks[4, 1000] ^= 0x10


def lose(blocks: NDArray[np.uint8]) -> None:
    blocks[4] = 0


def misplace(blocks: NDArray[np.uint8]) -> None:
    blocks[4] = blocks[5]


def tear(blocks: NDArray[np.uint8]) -> None:
    blocks[4, PAGE_BYTES:] = blocks[5, PAGE_BYTES:]


def tear_a_page(blocks: NDArray[np.uint8]) -> None:
    blocks[4, 2048:PAGE_BYTES] = blocks[5, 2048:PAGE_BYTES]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (flip, "1 words of 8 bytes differ, the first at byte 1000"),
        (lose, "no stamp of this run"),
        (misplace, "holds block 5 (3 of 3 pages, first 0)"),
        (tear, "holds block 5 (2 of 3 pages, first 1)"),
        (tear_a_page, "256 words of 8 bytes differ, the first at byte 2048"),
    ],
)
def test_harm_is_found_and_named(disk: Disk, harm: Callable[[NDArray[np.uint8]], None], said: str) -> None:
    harm(disk.blocks)
    [(block, fault)] = disk.faults(*range(NUM_BLOCKS))
    assert block == 4
    assert said in fault


def test_a_stale_block_is_found(disk: Disk) -> None:
    before = disk.blocks[3].copy()
    disk.write(3)
    disk.blocks[3] = before
    assert disk.faults(3) == [(3, "it holds write 1 of this block, the last was 2 (3 of 3 pages, first 0)")]


def test_the_rest_of_a_torn_write_is_found_although_its_slot_is_the_same(disk: Disk) -> None:
    """At a depth of 1 there is but one slot."""
    disk.write(3)
    before = disk.blocks[3, PAGE_BYTES:].copy()
    disk.write(3)
    assert disk.faults(3) == []
    disk.blocks[3, PAGE_BYTES:] = before
    assert disk.faults(3) == [(3, "it holds write 2 of this block, the last was 3 (2 of 3 pages, first 1)")]


def test_blocks_of_another_run_are_found(disk: Disk) -> None:
    """Also of one with the same seed, which wrote the same block as often: on the extents that it has left behind."""
    other = Disk()
    other.write(4)
    other.write(4)
    disk.blocks[4] = other.blocks[4]
    assert "no stamp of this run" in disk.faults(4)[0][1]


@pytest.mark.parametrize(
    "byte", [0, 8, 16, 24, STAMP_BYTES, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + STAMP_BYTES, BS - 1]
)
def test_any_flipped_bit_is_found(disk: Disk, byte: int) -> None:
    for bit in range(8):
        disk.blocks[2, byte] ^= 1 << bit
        assert [block for block, _ in disk.faults(*range(NUM_BLOCKS))] == [2]
        disk.blocks[2, byte] ^= 1 << bit


def test_slots_differ_from_each_other(disk: Disk) -> None:
    bodies = disk.slots[:, STAMP_BYTES:PAGE_BYTES]
    assert len({body.tobytes() for body in bodies}) == NUM_SLOTS
    assert (bodies == 0).mean() < 0.01  # random, so a drive that compresses gains nothing


def test_slots_of_a_batch_hold_the_generations_in_order(disk: Disk) -> None:
    """A lost write is found also if the block was written twice; batches never hold a block twice."""
    disk.write(2)
    kept = disk.blocks[2].copy()
    disk.write(2, first_slot=1)
    disk.blocks[2] = kept
    assert disk.faults(2) == [(2, "it holds write 2 of this block, the last was 3 (3 of 3 pages, first 0)")]

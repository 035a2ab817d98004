"""The pool of full weights: memory that is taken again while it is warm, and given back when it is asked to be."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.tiers.pool import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, SMALL_BYTES, MemoryPool
from io_daemon.shared.protocol import align_up

CPU = torch.device("cpu")


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_blocks_lie_as_asked_beside_each_other() -> None:
    pool = MemoryPool(1 << 20, CPU)
    a = pool.empty_strided((300, 500), (1, 300), torch.bfloat16)
    b = pool.empty(70_007, torch.float32)
    assert (a.shape, a.stride(), a.dtype) == ((300, 500), (1, 300), torch.bfloat16)
    assert (b.shape, b.dtype) == ((70_007,), torch.float32)
    a.fill_(1.0)
    b.fill_(2.0)
    assert a.eq(1.0).all()
    assert b.eq(2.0).all()
    assert a.data_ptr() % ALIGNMENT_BYTES == b.data_ptr() % ALIGNMENT_BYTES == 0
    assert not a._is_view()
    assert pool.free_bytes == HUGE_PAGE_BYTES - sum(
        align_up(size, ALIGNMENT_BYTES) for size in (2 * 300 * 500, 4 * 70_007)
    )


def test_a_block_goes_back_with_its_last_view_and_is_taken_again() -> None:
    pool = MemoryPool(1 << 20, CPU)
    block = pool.empty(100_000, torch.float32)
    place, view = block.data_ptr(), block[10:].fill_(3.0)
    del block
    other = pool.empty(100_000, torch.float32)
    assert other.data_ptr() != place
    assert view.eq(3.0).all()
    del view
    assert pool.empty(100_000, torch.float32).data_ptr() == place


def test_a_block_may_end_in_another_thread() -> None:
    pool = MemoryPool(1 << 20, CPU)
    held = [pool.empty(100_000, torch.float32)]
    assert pool.free_bytes < HUGE_PAGE_BYTES
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert pool.free_bytes == HUGE_PAGE_BYTES


def test_what_does_not_fit_is_torchs_own_and_comes_in_the_stead_of_what_is_free() -> None:
    pool = MemoryPool(8 * HUGE_PAGE_BYTES, CPU)
    first, kept, last = (pool.empty(size * HUGE_PAGE_BYTES, torch.uint8).fill_(1) for size in (3, 1, 4))
    del first, last
    before = anonymous_bytes()
    large = pool.empty(5 * HUGE_PAGE_BYTES, torch.uint8)
    assert before - anonymous_bytes() > 6 * HUGE_PAGE_BYTES
    assert large.fill_(2).eq(2).all()
    assert kept.eq(1).all()
    assert pool.free_bytes == 7 * HUGE_PAGE_BYTES


def test_trim_gives_back_what_is_free_and_nothing_else() -> None:
    pool = MemoryPool(64 * HUGE_PAGE_BYTES, CPU)
    before = anonymous_bytes()
    kept, freed = (pool.empty(32 * HUGE_PAGE_BYTES, torch.uint8).fill_(1) for _ in range(2))
    assert anonymous_bytes() - before > 60 * HUGE_PAGE_BYTES
    del freed
    assert anonymous_bytes() - before > 60 * HUGE_PAGE_BYTES, "it stays warm"
    pool.trim()
    assert 30 * HUGE_PAGE_BYTES < anonymous_bytes() - before < 36 * HUGE_PAGE_BYTES
    assert kept.eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_poisoned_memory_reads_as_nan(dtype: torch.dtype) -> None:
    pool = MemoryPool(1 << 20, CPU, poison=True)
    pool.empty(1000, dtype).fill_(1.0)
    assert pool.empty(1000, dtype).isnan().all()


def test_without_poison_contents_are_left_alone() -> None:
    pool = MemoryPool(1 << 20, CPU)
    pool.empty(100_000, torch.float32).fill_(1.0)
    assert pool.empty(100_000, torch.float32).eq(1.0).all()


def test_small_blocks_are_the_heaps_unless_they_are_to_be_poisoned() -> None:
    pool, poisoning = MemoryPool(1 << 20, CPU), MemoryPool(1 << 20, CPU, poison=True)
    shape, strides = (SMALL_BYTES // 4 - 1, 1), (1, 1)
    small = pool.empty_strided(shape, strides, torch.float32).fill_(1.0)
    assert (small.shape, small.stride()) == (shape, strides)
    assert small.sum() == SMALL_BYTES // 4 - 1
    assert pool.free_bytes == HUGE_PAGE_BYTES
    kept = poisoning.empty_strided(shape, strides, torch.float32)
    assert kept.shape == shape
    assert poisoning.free_bytes < HUGE_PAGE_BYTES


def test_no_memory_to_reserve_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError("the address space is limited")

    monkeypatch.setattr(mmap, "mmap", refuse)
    pool = MemoryPool(1 << 20, CPU)
    assert pool.empty(10, torch.float32).fill_(1.0).sum() == 10
    pool.trim()
    assert pool.free_bytes == 0


def test_nothing_is_reserved_for_another_device() -> None:
    pool = MemoryPool(1 << 40, torch.device("meta"))
    assert pool.empty(10, torch.float32).device.type == "meta"
    assert pool.free_bytes == 0


def test_empty_parameters_take_no_place() -> None:
    pool = MemoryPool(1 << 20, CPU)
    assert pool.empty_strided((0, 4), (4, 1), torch.float32).shape == (0, 4)
    assert pool.free_bytes == HUGE_PAGE_BYTES

"""The store of activations over a store that refuses: nothing that it took is lost to those who come later."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest
import torch

from infinity.errors import SwapSpaceError
from infinity.tiers.activations import ActivationStore
from infinity.tiers.base import ChunkLayout, HostStore
from io_daemon.shared.metrics import TenantStats
from tests.support.strict_store import StrictLease, StrictStore

FRAME_BYTES = 4096


class SmallStore(StrictStore, HostStore):
    """Has space for ``num_chunks_max`` chunks."""

    num_chunks_max = 3

    def register(self, layouts: Sequence[ChunkLayout]) -> range:
        if len(self.layouts) + len(layouts) > self.num_chunks_max:
            raise SwapSpaceError(path="/nvme", needed_bytes=1, free_bytes=0)
        return super().register(layouts)

    def tenant_stats(self) -> TenantStats | None:
        return None

    def relieve_by(self, relieve: Callable[[], None]) -> None:
        """Nobody waits for frames here."""

    def reserve(self) -> None:
        raise AssertionError("it was opened with all of its space")


def values(num_frames: int) -> torch.Tensor:
    return torch.randint(256, (num_frames * FRAME_BYTES - 7,), dtype=torch.uint8)


@pytest.fixture
def small() -> SmallStore:
    return SmallStore()


@pytest.fixture
def store(small: SmallStore) -> ActivationStore:
    return ActivationStore(small, frame_bytes=FRAME_BYTES, num_frames=4)


def assert_all_of_it_can_be_used(store: ActivationStore, small: SmallStore) -> None:
    assert store.num_waiting == 0
    assert small.num_held == 0
    given, found = values(small.num_chunks_max), torch.zeros(small.num_chunks_max * FRAME_BYTES - 7, dtype=torch.uint8)
    waiting = store.put(given)
    waiting.read_into(found)
    assert torch.equal(found, given)
    assert small.num_held == 0


def test_what_was_found_before_the_disk_was_full_is_given_back(store: ActivationStore, small: SmallStore) -> None:
    for _ in range(3):
        with pytest.raises(SwapSpaceError):
            store.put(values(small.num_chunks_max + 1))
    assert_all_of_it_can_be_used(store, small)


def test_a_write_that_fails_holds_nothing(store: ActivationStore, small: SmallStore) -> None:
    def fail_the_second(lease: StrictLease) -> None:
        if lease.chunk == 1:
            raise OSError("the drive")

    small.before_wait = fail_the_second
    with pytest.raises(OSError, match="the drive"):
        store.put(values(3))
    small.before_wait = lambda _lease: None
    assert_all_of_it_can_be_used(store, small)


def test_what_was_leased_ahead_of_tensors_that_nobody_waits_for_is_given_back(
    store: ActivationStore, small: SmallStore
) -> None:
    small.num_chunks_max = 100
    for _ in range(3):
        waiting = [store.put(values(1)) for _ in range(4)]
        found = torch.zeros(FRAME_BYTES - 7, dtype=torch.uint8)
        waiting[-1].read_into(found)
        assert small.num_held == 2, "those before it are leased ahead"
        waiting.clear()  # backward failed here
        gc.collect()
        assert store.num_waiting == 0
        assert small.num_held == 0


def test_it_reads_ahead_all_the_way_back(store: ActivationStore, small: SmallStore) -> None:
    small.num_chunks_max = 100
    waiting = [store.put(values(1)) for _ in range(8)]
    found = torch.zeros(FRAME_BYTES - 7, dtype=torch.uint8)
    for left in range(7, -1, -1):
        waiting.pop().read_into(found)
        assert small.num_held == min(2, left)

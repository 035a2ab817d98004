"""Leases that are used one by one, released and issued in bursts, or held for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity.tiers.base import ChunkLayout, Lease, ManyPieces, leased, spans, stream
from tests.support.strict_store import StrictLease, StrictStore

NUM_CHUNKS = 11


def issued(store: StrictStore) -> Iterator[tuple[Lease, int]]:
    return ((store.acquire(chunk, read=1, write=1), chunk) for chunk in range(NUM_CHUNKS))


@pytest.fixture
def store() -> StrictStore:
    store = StrictStore()
    store.register([ChunkLayout(numel=64, dtypes={0: torch.float32})] * NUM_CHUNKS)
    return store


@pytest.mark.parametrize(("held", "burst"), [(1, 1), (4, 1), (4, 2), (6, 3), (6, 6), (20, 10)])
def test_all_are_used_in_order_and_no_more_are_held_than_may_be(store: StrictStore, held: int, burst: int) -> None:
    seen: list[int] = []

    def use(lease: Lease, chunk: int) -> tuple[int, int]:
        seen.append(chunk)
        lease.pieces(0)[0].fill_(chunk)
        return 1, 0

    stream(issued(store), use, num_held_max=held, num_at_once=burst)
    assert seen == list(range(NUM_CHUNKS))
    assert store.num_held_max == min(held, NUM_CHUNKS)
    assert store.num_held == 0
    assert [store.object(chunk, 0)[0].item() for chunk in range(NUM_CHUNKS)] == seen
    turns = [entry[0] for entry in store.log]
    first_release = turns.index("release")
    assert turns[first_release : first_release + min(burst, NUM_CHUNKS)] == ["release"] * min(burst, NUM_CHUNKS)


def test_what_was_used_before_an_error_is_kept_and_the_rest_given_back_unwritten(store: StrictStore) -> None:
    def use(lease: Lease, chunk: int) -> tuple[int, int]:
        lease.pieces(0)[0].fill_(7)
        if chunk == 4:
            raise ValueError("enough")
        return 1, 0

    with pytest.raises(ValueError, match="enough"):
        stream(issued(store), use, num_held_max=6, num_at_once=3)
    assert store.num_held == 0
    assert [store.object(chunk, 0)[0].item() for chunk in range(6)] == [7, 7, 7, 7, 0, 0]


def test_a_lease_that_is_not_granted_ends_it_with_nothing_held(store: StrictStore) -> None:
    def refuse(lease: StrictLease) -> None:
        if lease.chunk == 5:
            raise OSError("the drive")

    store.before_wait = refuse
    with pytest.raises(OSError, match="the drive"):
        stream(issued(store), lambda _lease, _chunk: (0, 0), num_held_max=4, num_at_once=2)
    assert store.num_held == 0


def test_a_lease_of_a_block_is_granted_in_it_and_written_after_it(store: StrictStore) -> None:
    with leased(store, 3, read=1, write=1) as lease:
        lease.pieces(0)[0].fill_(7)
        assert store.num_held == 1
    with leased(store, 3, read=1) as lease:
        assert lease.pieces(0)[0][0].item() == 7
    assert store.acquired() == [(3, 1, 1), (3, 1, 0)]
    assert store.released() == [(3, 1, 0), (3, 0, 0)]
    assert store.num_held == 0


def write_and_fail(store: StrictStore, where: str) -> None:
    with leased(store, 3, write=1) as lease:
        lease.pieces(0)[0].fill_(7)
        raise OSError(where)


@pytest.mark.parametrize("where", ["while it is waited for", "in its block"])
def test_where_a_block_fails_nothing_is_held_and_nothing_was_written(store: StrictStore, where: str) -> None:
    def fail(_lease: StrictLease) -> None:
        if where == "while it is waited for":
            raise OSError(where)

    store.before_wait = fail
    with pytest.raises(OSError, match=where):
        write_and_fail(store, where)
    assert store.num_held == 0
    assert store.object(3, 0)[0].item() == 0


class CountedPieces(ManyPieces):
    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_of_many_pieces_only_those_are_looked_at_that_hold_what_is_asked_for() -> None:
    plain = list(torch.split(torch.arange(40.0), [3, 1, 8, 2, 16, 10]))
    for offset in range(40):
        for numel in range(1, 41 - offset):
            many = CountedPieces(plain)
            found = [(done, part.tolist()) for done, part in spans(many, offset, numel)]
            assert found == [(done, part.tolist()) for done, part in spans(plain, offset, numel)]
            assert many.looks == len(found)
    with pytest.raises(IndexError, match="1 of 2 elements"):
        list(spans(CountedPieces(plain), 39, 2))

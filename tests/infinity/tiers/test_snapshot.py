"""The order in which a snapshot's chunks are read."""

from __future__ import annotations

import torch

from infinity.tiers.base import ChunkLayout, Lease
from infinity.tiers.memory import MemoryStore
from infinity.tiers.snapshot import Snapshot

NUM_CHUNKS = 6


def _read(unmade: set[int], *, made_while_reading: dict[int, list[int]]) -> tuple[list[int], int]:
    """The chunks in the order of their reading; by how many of these ``made_while_reading`` makes others. And how often
    all were made."""
    store = MemoryStore(torch.device("cpu"))
    store.register([ChunkLayout(numel=4, dtypes={0: torch.float32}) for _ in range(NUM_CHUNKS)])
    times_made: list[None] = []
    snapshot = Snapshot(store, dict.fromkeys(range(NUM_CHUNKS), 1), unmade, when_made=lambda: times_made.append(None))
    read: list[int] = []

    def use(lease: Lease) -> None:
        read.append(lease.chunk)
        for chunk in made_while_reading.get(len(read), []):
            snapshot.made(chunk)

    for chunk in made_while_reading.get(0, []):
        snapshot.made(chunk)
    snapshot.read_all(use)
    return read, len(times_made)


def test_what_changes_first_is_read_first_where_all_is_there() -> None:
    assert _read(set(), made_while_reading={}) == ([0, 1, 2, 3, 4, 5], 1)


def test_what_an_update_has_just_left_in_frames_comes_first_and_then_what_changes_first() -> None:
    made = {0: [0, 1, 2], 1: [3, 4], 2: [5]}
    assert _read(set(range(NUM_CHUNKS)), made_while_reading=made) == ([2, 4, 0, 1, 3, 5], 1)

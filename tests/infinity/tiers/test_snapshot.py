"""The order in which a snapshot's chunks are read."""

from __future__ import annotations

import torch

from infinity.tiers.base import ChunkLayout, Lease
from infinity.tiers.memory import MemoryStore
from infinity.tiers.snapshot import Snapshot, SnapshotStore
from tests.support.strict_store import StrictStore

NUM_CHUNKS = 6
SMALL = ChunkLayout(numel=4, dtypes={0: torch.float32})


def _read(unmade: set[int], *, made_while_reading: dict[int, list[int]]) -> tuple[list[int], int]:
    """The chunks in the order of their reading; by how many of these ``made_while_reading`` makes others. And how often
    all were made."""
    store = MemoryStore(torch.device("cpu"))
    store.register([SMALL] * NUM_CHUNKS)
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


def test_a_snapshot_that_ends_holds_no_frames() -> None:
    strict = StrictStore()
    strict.register([SMALL] * 3)
    snapshot = Snapshot(strict, dict.fromkeys(range(3), 1), set(), when_made=lambda: None)
    assert snapshot.keeps(0, 1)
    assert snapshot.keeps(1, 1)
    assert strict.num_held == 2
    snapshot.end("nobody wants it")
    assert strict.num_held == 0


def test_who_waits_for_a_snapshot_s_reader_gives_back_what_copies_hold_first() -> None:
    """The reader may wait for those frames."""
    strict = StrictStore()
    told: list[str] = []
    strict.register([SMALL])
    store = SnapshotStore(strict, lambda: told.append("relieved"))
    snapshot = store.take({0: 1}, set(), lambda: None)
    lease = store.acquire(0, write=1)
    snapshot.end("")  # nothing to wait for
    lease.wait()
    assert told == ["relieved"]

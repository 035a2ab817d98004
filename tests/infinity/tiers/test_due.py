"""What is due of a chunk is done once, before anybody sees it, and by whoever comes first."""

from __future__ import annotations

import pytest
import torch

from infinity.tiers.base import ChunkLayout, Lease
from infinity.tiers.due import DUE_TRACES, DueStore, Work
from infinity.tiers.layers import TracedStore
from infinity.tiers.snapshot import SnapshotStore
from io_daemon.shared.protocol import ObjectKind
from tests.support.strict_store import StrictLease, StrictStore

W, G, M = ObjectKind.WEIGHT, ObjectKind.GRAD, ObjectKind.MASTER
NUMEL = 8


class Fixture:
    """Chunks whose update adds the gradient to the master weight, and copies that to the weight."""

    def __init__(self, num_chunks: int = 1, *, num_ahead: int = 1) -> None:
        self.strict = StrictStore()
        snapshots = SnapshotStore(self.strict)
        self.traced = TracedStore(snapshots)
        self.store = DueStore(self.traced, snapshots, num_ahead=num_ahead)
        self.store.register([ChunkLayout(numel=NUMEL, dtypes=dict.fromkeys((W, G, M), torch.float32))] * num_chunks)
        self.done: list[int] = []
        self.fault: Exception | None = None

    def postpone(self, *chunks: int) -> None:
        for chunk in chunks:
            self.strict.object(chunk, G).fill_(1.0)

            def run(lease: Lease, chunk: int = chunk) -> None:
                if self.fault is not None:
                    raise self.fault
                lease.pieces(M)[0].add_(lease.pieces(G)[0])
                lease.pieces(W)[0].copy_(lease.pieces(M)[0])
                self.done.append(chunk)

            work = Work(
                read=G.mask | M.mask, write=M.mask | W.mask, dead=G.mask, run=run, note="an update is due of it"
            )
            self.store.postpone(chunk, work)

    def read(self, chunk: int, kind: ObjectKind = W) -> list[float]:
        lease = self.store.acquire(chunk, read=kind.mask)
        lease.wait()
        found: list[float] = lease.pieces(kind)[0].tolist()
        lease.release()
        return found

    def kept(self, chunk: int) -> dict[str, float]:
        return {kind.name: float(self.strict.object(chunk, kind)[0]) for kind in (W, G, M)}


@pytest.mark.parametrize("kind", [W, M])
def test_whoever_needs_the_chunk_sees_it_done_through_one_lease(kind: ObjectKind) -> None:
    fixture = Fixture()
    fixture.postpone(0)
    assert fixture.store.is_due(0)
    assert fixture.read(0, kind) == [1.0] * NUMEL
    assert fixture.strict.acquired() == [(0, G.mask | M.mask, M.mask | W.mask)]
    assert fixture.strict.released() == [(0, M.mask | W.mask, G.mask)]
    assert fixture.kept(0) == {"WEIGHT": 1.0, "GRAD": 0.0, "MASTER": 1.0}
    assert not fixture.store.is_due(0)
    assert fixture.read(0, kind) == [1.0] * NUMEL
    assert fixture.strict.acquired()[1:] == [(0, kind.mask, 0)], "and is asked for no more than it needs after that"
    assert fixture.done == [0]


def test_who_writes_writes_after_it() -> None:
    fixture = Fixture()
    fixture.postpone(0)
    lease = fixture.store.acquire(0, write=G.mask)
    lease.wait()
    lease.pieces(G)[0].fill_(7.0)
    lease.release(dirty=G.mask)
    assert fixture.kept(0) == {"WEIGHT": 1.0, "GRAD": 7.0, "MASTER": 1.0}


def test_a_lease_given_up_leaves_it_due() -> None:
    fixture = Fixture()
    fixture.postpone(0)
    fixture.store.acquire(0, read=W.mask).release()
    assert fixture.strict.released() == [(0, 0, 0)]
    assert (fixture.store.is_due(0), fixture.done) == (True, [])
    assert fixture.read(0) == [1.0] * NUMEL


def test_a_second_lease_beside_one_held_ahead_waits_for_nobody() -> None:
    """The one held ahead writes, so that a second would stand behind it; it is done, and held on for its own kinds."""
    fixture = Fixture()
    fixture.postpone(0)
    ahead = fixture.store.acquire(0, read=W.mask)
    assert fixture.read(0, M) == [1.0] * NUMEL
    assert fixture.strict.acquired()[1:] == [(0, W.mask, 0), (0, M.mask, 0)]
    ahead.wait()
    assert ahead.pieces(W)[0].tolist() == [1.0] * NUMEL
    ahead.release()
    assert (fixture.done, fixture.strict.num_held) == ([0], 0)
    assert fixture.strict.released()[-1] == (0, 0, 0)


def test_a_fault_before_it_says_so_and_leaves_it_due() -> None:
    fixture = Fixture()
    fixture.postpone(0)

    def fault(_lease: StrictLease) -> None:
        raise OSError("injected")

    fixture.strict.before_wait = fault
    with pytest.raises(OSError, match="injected") as caught:
        fixture.store.settle()
    assert caught.value.__notes__ == ["an update is due of it"]
    assert (fixture.strict.num_held, fixture.store.is_due(0)) == (0, True)
    fixture.strict.before_wait = lambda _lease: None
    assert fixture.read(0) == [1.0] * NUMEL


def test_a_fault_within_it_leaves_nothing_of_it_in_the_store() -> None:
    fixture = Fixture()
    fixture.postpone(0)
    fixture.fault = RuntimeError("injected")
    with pytest.raises(RuntimeError, match="injected"):
        fixture.read(0)
    assert fixture.kept(0) == {"WEIGHT": 0.0, "GRAD": 1.0, "MASTER": 0.0}


@pytest.mark.parametrize("num_ahead", [0, 1, 5])
def test_settling_does_all_in_the_order_in_which_it_was_postponed(num_ahead: int) -> None:
    fixture = Fixture(4, num_ahead=num_ahead)
    fixture.postpone(3, 1, 0, 2)
    fixture.store.settle()
    assert fixture.done == [3, 1, 0, 2]
    assert fixture.strict.num_held_max == min(num_ahead + 1, 4)
    fixture.store.settle()
    assert len(fixture.strict.acquired()) == 4


def test_settling_does_what_a_lease_held_ahead_was_to_do() -> None:
    fixture = Fixture(3)
    fixture.postpone(0, 1, 2)
    ahead = fixture.store.acquire(1, read=W.mask)
    fixture.store.settle()
    assert sorted(fixture.done) == [0, 1, 2]
    ahead.wait()
    assert ahead.pieces(W)[0].tolist() == [1.0] * NUMEL
    ahead.release()
    assert fixture.strict.num_held == 0
    assert all(read | write for _, read, write in fixture.strict.acquired()), "no lease is for nothing"


def test_settling_some_leaves_the_others() -> None:
    fixture = Fixture(4)
    fixture.postpone(3, 1, 0)
    fixture.store.settle([0, 1, 2])
    assert fixture.done == [0, 1]
    assert [fixture.store.is_due(chunk) for chunk in range(4)] == [False, False, False, True]
    fixture.store.forget_due()
    assert fixture.read(3) == [0.0] * NUMEL


def test_a_pass_with_work_due_is_another_pass() -> None:
    fixture = Fixture()
    told: list[tuple[int, int]] = []
    fixture.strict.set_trace = lambda trace_id, accesses: told.append((trace_id, len(accesses)))  # type: ignore[method-assign]
    for due in (False, True, False, True):
        if due:
            fixture.postpone(0)
        fixture.store.mark(1)
        fixture.read(0)
        fixture.store.complete()
    assert told == [(1, 1), (1 + DUE_TRACES, 1)]

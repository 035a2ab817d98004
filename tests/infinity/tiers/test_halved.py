"""Masters in halves: what a lease asks of the store below, and what its holder sees."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from infinity.errors import ConfigError
from infinity.tiers.base import ChunkLayout, Lease
from infinity.tiers.halved import HalvedStore
from infinity.tiers.halves import cut
from infinity.tiers.memory import MemoryStore
from io_daemon.shared.protocol import Access, ObjectKind
from tests.support.strict_store import StrictStore

W, G, M = ObjectKind.WEIGHT, ObjectKind.GRAD, ObjectKind.MASTER
V = ObjectKind.STATE_1
TIE = 1 + 2**-8
"""Rounded down to even: it needs a mark."""
NUMEL = 8
HALVES = W.mask | M.mask | V.mask
TRAINED = {int(W): torch.bfloat16, int(G): torch.bfloat16, int(M): torch.float32, int(V): torch.float32}


class Fixture:
    """A trained chunk, and a frozen one."""

    def __init__(self) -> None:
        self.strict = StrictStore(piece_numel=NUMEL // 2)
        self.store = HalvedStore(self.strict, V)
        layouts = [TRAINED, {int(W): torch.bfloat16}]
        self.store.register([ChunkLayout(numel=NUMEL, dtypes=dtypes) for dtypes in layouts])

    def write(self, kind: ObjectKind, value: float, *, dirty: bool = True) -> None:
        followers = W.mask if kind == M else 0
        lease = self.store.acquire(0, read=kind.mask, write=kind.mask | followers)
        lease.wait()
        for number, piece in enumerate(lease.pieces(kind)):
            piece.fill_(value)
            if kind == M:
                lease.pieces(W)[number].copy_(piece)
        lease.release(dirty=(kind.mask | followers) if dirty else 0)

    def read(self, kind: ObjectKind) -> list[float]:
        lease = self.store.acquire(0, read=kind.mask)
        lease.wait()
        found: list[float] = torch.cat(lease.pieces(kind)).tolist()
        lease.release()
        return found


def test_only_masters_are_stored_otherwise() -> None:
    fixture = Fixture()
    assert fixture.strict.layouts[0].dtypes == {**TRAINED, M: torch.int16}
    assert fixture.strict.layouts[1].dtypes == {W: torch.bfloat16}


@pytest.mark.parametrize("value", [TIE, -TIE, 1 + 3 * 2**-8, 0.1, 0.0])
def test_what_is_written_is_read(value: float) -> None:
    fixture = Fixture()
    fixture.write(M, value)
    fixture.write(V, 0.5)
    assert fixture.read(M) == torch.full((NUMEL,), value).tolist()
    assert fixture.read(V) == [0.5] * NUMEL
    assert (fixture.strict.object(0, V) < 0).all() == (abs(value) == TIE), "below, the mark is a sign"
    fixture.write(M, 2.0)
    assert fixture.read(V) == fixture.strict.object(0, V).tolist() == [0.5] * NUMEL


@pytest.mark.parametrize(
    ("read", "write", "below"),
    [
        (W.mask, 0, (W.mask, 0)),
        (G.mask, G.mask, (G.mask, G.mask)),
        (M.mask, 0, (HALVES, 0)),
        (V.mask, 0, (HALVES, 0)),
        (0, M.mask | W.mask, (HALVES, HALVES)),
        (0, M.mask | V.mask | W.mask, (0, HALVES)),
        (G.mask | M.mask | V.mask, M.mask | V.mask | W.mask, (G.mask | HALVES, HALVES)),
    ],
)
def test_what_a_lease_takes(read: int, write: int, below: tuple[int, int]) -> None:
    fixture = Fixture()
    fixture.store.acquire(0, read=read, write=write).release()
    assert fixture.strict.acquired() == [(0, *below)]
    seen: list[Access] = []
    fixture.strict.set_trace = lambda _id, accesses: seen.extend(accesses)  # type: ignore[method-assign,assignment]
    fixture.store.set_trace(1, [Access(0, read, write, 0), Access(1, W.mask, 0, 0)])
    assert seen == [Access(0, *below, 0), Access(1, W.mask, 0, 0)], "the daemon is told the same"


def test_markers_are_written_only_where_marks_come_or_go() -> None:
    fixture = Fixture()
    dirty = []
    for value in (0.1, TIE, 0.1):
        fixture.write(M, value)
        dirty.append(fixture.strict.released()[-1][1])
    assert dirty == [W.mask | M.mask, HALVES, HALVES]


def test_what_is_not_dirty_leaves_marks_as_they_were() -> None:
    memory = MemoryStore(torch.device("cpu"))  # a lease of it writes in place
    store = HalvedStore(memory, V)
    store.register([ChunkLayout(numel=NUMEL, dtypes=TRAINED)])
    fixture = Fixture()
    fixture.store = store
    fixture.write(M, TIE)
    fixture.write(V, 0.5)
    lease = store.acquire(0, read=G.mask | M.mask | V.mask, write=M.mask | V.mask | W.mask)
    lease.wait()
    lease.release()
    assert fixture.read(M) == [TIE] * NUMEL
    assert fixture.read(V) == [0.5] * NUMEL


STEPPED = M.mask | V.mask


def stepped(fixture: Fixture, master: float) -> Lease:
    """A lease through which masters were written and rounded, as an update does it."""
    lease = fixture.store.acquire(0, read=STEPPED, write=STEPPED | W.mask)
    lease.wait()
    for kind, value in ((M, master), (V, 0.5)):
        for piece in lease.pieces(kind):
            piece.fill_(value)
    lease.round_masters()
    return lease


@pytest.mark.parametrize("value", [TIE, 0.1])
def test_who_has_masters_rounded_reads_weights_and_nothing_is_cut_twice(value: float) -> None:
    fixture = Fixture()
    fixture.write(M, -TIE)
    with mock.patch("infinity.tiers.halved.cut", side_effect=cut) as cuts:
        lease = stepped(fixture, value)
        assert torch.cat(lease.pieces(W)).tolist() == torch.full((NUMEL,), value).bfloat16().tolist()
        lease.release(dirty=STEPPED | W.mask)
    assert cuts.call_count == 2, "a piece each"
    assert fixture.read(M) == torch.full((NUMEL,), value).tolist()
    assert fixture.read(V) == [0.5] * NUMEL


def test_who_looks_at_them_again_sees_no_marks_and_may_write() -> None:
    fixture = Fixture()
    lease = stepped(fixture, TIE)
    assert torch.cat(lease.pieces(V)).tolist() == [0.5] * NUMEL
    assert torch.cat(lease.pieces(M)).tolist() == [TIE] * NUMEL
    lease.pieces(V)[1].fill_(0.25)
    lease.round_masters()
    lease.pieces(M)[0].fill_(0.1)
    lease.release(dirty=STEPPED | W.mask)
    assert fixture.read(M) == [*torch.full((4,), 0.1).tolist(), *[TIE] * 4]
    assert fixture.read(V) == [0.5] * 4 + [0.25] * 4


def test_rounded_and_then_not_said_to_be_dirty_they_are_whole_where_the_lease_writes_in_place() -> None:
    fixture = Fixture()
    fixture.store = HalvedStore(MemoryStore(torch.device("cpu")), V)
    fixture.store.register([ChunkLayout(numel=NUMEL, dtypes=TRAINED)])
    fixture.write(M, 0.1)
    fixture.write(V, 0.25)
    stepped(fixture, TIE).release()
    assert fixture.read(M) == [TIE] * NUMEL
    assert fixture.read(V) == [0.5] * NUMEL


def test_interrupted_while_marks_are_taken_away_again_it_refuses_rather_than_lose_them() -> None:
    fixture = Fixture()
    lease = stepped(fixture, TIE)
    with (
        mock.patch("infinity.tiers.halved.unmark", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        lease.pieces(M)
    with pytest.raises(ConfigError):
        lease.release(dirty=STEPPED | W.mask)
    with pytest.raises(ConfigError):
        fixture.read(M)


def test_a_negative_state_is_told_at_the_release() -> None:
    fixture = Fixture()
    lease = stepped(fixture, TIE)
    lease.pieces(V)[1].fill_(-0.5)
    lease.round_masters()
    assert torch.cat(lease.pieces(W)).tolist() == [1.0] * NUMEL
    assert torch.cat(lease.pieces(V)).tolist() == [0.5] * 4 + [-0.5] * 4, "no mark is left of the first piece"
    with pytest.raises(ConfigError, match="negative"):
        lease.release(dirty=STEPPED | W.mask)


def test_two_may_read_at_a_time() -> None:
    store = HalvedStore(MemoryStore(torch.device("cpu")), V)
    store.register([ChunkLayout(numel=NUMEL, dtypes=TRAINED)])
    fixture = Fixture()
    fixture.store = store
    fixture.write(M, TIE)
    leases = [store.acquire(0, read=M.mask | V.mask) for _ in range(2)]
    for lease in leases:
        lease.wait()
    for lease in leases:
        assert lease.pieces(M)[0].tolist() == [TIE] * NUMEL
        assert not lease.pieces(V)[0].signbit().any()
        lease.release()
    assert fixture.read(M) == [TIE] * NUMEL


def test_between_parameters_is_zero_where_all_is_new() -> None:
    fixture = Fixture()
    lease = fixture.store.acquire(0, write=HALVES)
    lease.wait()
    for kind in (W, M, V):
        lease.pieces(kind)[0].fill_(1.0)
    lease.release(dirty=HALVES)
    assert fixture.read(M) == fixture.read(V) == [1.0] * 4 + [0.0] * 4


def test_memory_for_masters_is_used_again() -> None:
    fixture = Fixture()
    addresses = set()
    for _ in range(3):
        lease = fixture.store.acquire(0, read=M.mask)
        lease.wait()
        addresses.add(lease.pieces(M)[0].data_ptr())
        lease.release()
    assert len(addresses) == 1

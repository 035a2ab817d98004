"""Weights that were given up: who may give up what, and what the next reader gets."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from infinity.tiers.base import ChunkLayout
from infinity.tiers.remade import RemadeStore, remade_accesses
from io_daemon.shared.protocol import Access, ObjectKind
from tests.support.strict_store import StrictLease, StrictStore

W, M = ObjectKind.WEIGHT, ObjectKind.MASTER
NUMEL = 8
VALUES = [1.0, 1 + 2**-8, 1 + 3 * 2**-8, -0.0, 3.3e38, 1e-40, -7.1, 0.1]
TRAINED, FROZEN = 0, 1


class Fixture:
    """A trained chunk, whose frames cut masters and weights at different places, and one that has no masters."""

    def __init__(self) -> None:
        self.strict = StrictStore(piece_numel=3)
        self.store = RemadeStore(self.strict, {TRAINED})
        trained = {int(W): torch.bfloat16, int(M): torch.float32}
        self.store.register([ChunkLayout(numel=NUMEL, dtypes=each) for each in (trained, {int(W): torch.bfloat16})])
        self.update(VALUES)

    def update(self, values: list[float]) -> None:
        """As updates do: weights are written and not read."""
        lease = self.store.acquire(TRAINED, read=M.mask, write=W.mask | M.mask)
        lease.wait()
        for kind in (M, W):
            for piece, part in zip(lease.pieces(kind), torch.split(torch.tensor(values), 3), strict=True):
                piece.copy_(part)
        lease.release(dirty=W.mask | M.mask)

    def read(self, *, dead: int = 0, chunk: int = TRAINED) -> torch.Tensor:
        lease = self.store.acquire(chunk, read=W.mask)
        lease.wait()
        found = torch.cat(lease.pieces(W)).clone()
        lease.release(dead=dead)
        return found


def test_the_next_reader_has_them_made_of_the_masters_and_those_after_it_read_them() -> None:
    fixture = Fixture()
    before = fixture.read(dead=W.mask)
    assert not fixture.strict.object(TRAINED, W).any()  # the store below was told
    fixture.strict.log.clear()
    assert torch.equal(fixture.read().view(torch.int16), before.view(torch.int16))
    assert fixture.strict.acquired() == [(TRAINED, M.mask, W.mask)]
    assert fixture.strict.released() == [(TRAINED, W.mask, 0)]
    fixture.strict.log.clear()
    assert torch.equal(fixture.read().view(torch.int16), before.view(torch.int16))
    assert fixture.strict.acquired() == [(TRAINED, W.mask, 0)]


def test_made_and_given_up_again_they_are_not_written() -> None:
    fixture = Fixture()
    before = fixture.read(dead=W.mask)
    for _ in range(2):
        assert torch.equal(fixture.read(dead=W.mask).view(torch.int16), before.view(torch.int16))
    assert not fixture.strict.object(TRAINED, W).any()
    assert torch.equal(fixture.read().view(torch.int16), before.view(torch.int16))


def test_an_update_brings_new_ones_and_reads_none() -> None:
    fixture = Fixture()
    fixture.read(dead=W.mask)
    fixture.strict.log.clear()
    fixture.update([2.0] * NUMEL)
    assert fixture.strict.acquired() == [(TRAINED, M.mask, W.mask | M.mask)]
    assert fixture.read().tolist() == [2.0] * NUMEL
    assert fixture.strict.acquired()[-1] == (TRAINED, W.mask, 0)


def test_who_reads_and_writes_them_goes_on_from_what_they_were() -> None:
    fixture = Fixture()
    before = fixture.read(dead=W.mask)
    lease = fixture.store.acquire(TRAINED, read=W.mask, write=W.mask)
    lease.wait()
    lease.pieces(W)[0][0] = 5.0
    lease.release(dirty=W.mask)
    assert fixture.read().tolist() == [5.0, *before[1:].tolist()]


def test_masters_alone_are_read_as_ever() -> None:
    fixture = Fixture()
    fixture.read(dead=W.mask)
    lease = fixture.store.acquire(TRAINED, read=M.mask)
    lease.wait()
    assert torch.equal(torch.cat(lease.pieces(M)), torch.tensor(VALUES))
    lease.release()
    assert fixture.strict.acquired()[-1] == (TRAINED, M.mask, 0)


def write_masters(fixture: Fixture, value: float) -> None:
    lease = fixture.store.acquire(TRAINED, read=M.mask, write=M.mask)
    lease.wait()
    for piece in lease.pieces(M):
        piece.fill_(value)
    lease.release(dirty=M.mask)


@pytest.mark.parametrize("given_up", [False, True])
def test_masters_that_are_written_alone_give_weights_up(given_up: bool) -> None:
    fixture = Fixture()
    fixture.read(dead=W.mask if given_up else 0)
    write_masters(fixture, 1 + 2**-8)
    assert fixture.strict.acquired()[-1] == (TRAINED, M.mask, M.mask | (0 if given_up else W.mask))
    assert fixture.strict.released()[-1] == (TRAINED, M.mask, 0 if given_up else W.mask)
    assert fixture.store.is_given_up(TRAINED)
    assert fixture.read().tolist() == [1.0] * NUMEL
    assert fixture.read().tolist() == [1.0] * NUMEL
    assert not fixture.store.is_given_up(TRAINED)


def test_masters_are_not_written_alone_beside_a_lease_on_weights() -> None:
    fixture = Fixture()
    other = fixture.store.acquire(TRAINED, read=W.mask)
    with pytest.raises(RuntimeError, match=f"masters of chunk {TRAINED}"):
        fixture.store.acquire(TRAINED, write=M.mask)
    other.release()
    write_masters(fixture, 2.0)
    assert fixture.read().tolist() == [2.0] * NUMEL


@pytest.mark.parametrize("waited", [False, True])
def test_while_somebody_else_has_a_lease_on_them_they_are_not_given_up(waited: bool) -> None:
    fixture = Fixture()
    other = fixture.store.acquire(TRAINED, read=W.mask)
    if waited:
        other.wait()
    before = fixture.read(dead=W.mask)
    assert fixture.strict.released()[-1] == (TRAINED, 0, 0)
    other.wait()
    assert torch.equal(torch.cat(other.pieces(W)), before)
    other.release(dead=W.mask)  # the last one may
    assert fixture.strict.released()[-1] == (TRAINED, 0, W.mask)
    assert torch.equal(fixture.read(), before)


def test_a_lease_that_is_abandoned_makes_nothing_and_leaves_them_given_up() -> None:
    fixture = Fixture()
    before = fixture.read(dead=W.mask)
    fixture.store.acquire(TRAINED, read=W.mask).release()
    assert fixture.strict.released()[-1] == (TRAINED, 0, 0)
    assert torch.equal(fixture.read(), before)


def test_a_master_that_cannot_be_read_leaves_them_given_up() -> None:
    fixture = Fixture()
    before = fixture.read(dead=W.mask)

    def fail(lease: StrictLease) -> None:
        raise OSError(5, "a fault")

    fixture.strict.before_wait = fail
    lease = fixture.store.acquire(TRAINED, read=W.mask)
    with pytest.raises(OSError, match="a fault"):
        lease.wait()
    lease.release()
    fixture.strict.before_wait = lambda _lease: None
    assert torch.equal(fixture.read(), before)


def test_weights_without_masters_die_as_anything_does() -> None:
    fixture = Fixture()
    fixture.strict.object(FROZEN, W).fill_(3.0)
    assert fixture.read(chunk=FROZEN).tolist() == [3.0] * NUMEL
    fixture.read(chunk=FROZEN, dead=W.mask)
    assert fixture.read(chunk=FROZEN).tolist() == [0.0] * NUMEL
    assert fixture.strict.acquired()[-1] == (FROZEN, W.mask, 0)


def test_a_trace_names_what_the_store_below_will_be_asked_for() -> None:
    w, m, g = W.mask, M.mask, ObjectKind.GRAD.mask
    above = [
        Access(TRAINED, w, 0, 0),
        Access(FROZEN, w, 0, 0),
        Access(TRAINED, w, 0, w),
        Access(TRAINED, w | g, g, w),
        Access(TRAINED, m, m, 0),
    ]
    made = Access(TRAINED, m, w, 0)  # the pass before has given them up
    assert remade_accesses(above, {TRAINED}) == [
        made,
        Access(FROZEN, w, 0, 0),
        Access(TRAINED, w, 0, w),
        Access(TRAINED, m | g, w | g, w),
        Access(TRAINED, m, m, 0),
    ]
    updated = [*above, Access(TRAINED, m, m | w, 0)]
    assert remade_accesses(updated, {TRAINED})[0] == above[0]
    assert remade_accesses([*above, Access(TRAINED, m, m | w, w)], {TRAINED})[0] == made
    assert remade_accesses(above, set()) == above
    update = Access(TRAINED, m, m, 0)  # inside backward
    assert remade_accesses([above[2], update], {TRAINED}) == [made._replace(dead_mask=w), update]
    buried = update._replace(write_mask=m | w, dead_mask=w)
    assert remade_accesses([above[0], update], {TRAINED}) == [made, buried], "the read keeps them, in vain"


def test_the_store_below_is_told_so() -> None:
    fixture = Fixture()
    told = []
    with mock.patch.object(fixture.strict, "set_trace", side_effect=lambda *given: told.append(given)):
        fixture.store.set_trace(0, [Access(TRAINED, W.mask, 0, W.mask)])
    assert told == [(0, [Access(TRAINED, M.mask, W.mask, W.mask)])]


def test_who_asks_is_told_what_is_given_up() -> None:
    fixture = Fixture()
    assert not fixture.store.is_given_up(TRAINED)
    fixture.read(dead=W.mask)
    assert fixture.store.is_given_up(TRAINED)
    fixture.update(VALUES)
    assert not fixture.store.is_given_up(TRAINED)
    fixture.read(dead=W.mask)
    fixture.store.unregister(range(1))
    assert not fixture.store.is_given_up(TRAINED)

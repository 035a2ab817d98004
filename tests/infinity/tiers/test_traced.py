"""Which passes are recorded, and what the store below is told of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from infinity.tiers.base import ChunkLayout
from infinity.tiers.layers import TracedStore
from io_daemon.shared.protocol import Access, ObjectKind
from tests.support.strict_store import StrictStore

W = ObjectKind.WEIGHT.mask


class Fixture:
    def __init__(self) -> None:
        self.strict = StrictStore()
        self.store = TracedStore(self.strict)
        layout = ChunkLayout(numel=8, dtypes={int(ObjectKind.WEIGHT): torch.float32})
        self.store.register([layout] * 3)
        self.told: list[tuple[int, list[Access]]] = []
        self.strict.set_trace = self._set_trace  # type: ignore[method-assign]

    def _set_trace(self, trace_id: int, accesses: Sequence[Access]) -> None:
        self.told.append((trace_id, list(accesses)))

    def run(self, trace_id: int, chunks: Sequence[int], *, dead: int = 0, fails: bool = False) -> None:
        """A pass that reads these chunks, and leaves ``dead`` behind."""
        self.store.mark(trace_id)
        for chunk in chunks:
            lease = self.store.acquire(chunk, read=W)
            lease.wait()
            lease.release(dead=dead)
        if fails:
            self.store.abandon()
        else:
            self.store.complete()


def accesses(chunks: Sequence[int], dead: int = 0) -> list[Access]:
    return [Access(chunk, W, 0, dead) for chunk in chunks]


def test_a_second_pass_like_the_first_is_told_nobody() -> None:
    fixture = Fixture()
    for _ in range(3):
        fixture.run(0, [0, 1])
    assert fixture.told == [(0, accesses([0, 1]))]


@pytest.mark.parametrize(("chunks", "dead"), [([1, 0], 0), ([0, 1], W), ([0], 0)])
def test_a_second_pass_of_another_kind_takes_the_place_of_the_first(chunks: list[int], dead: int) -> None:
    fixture = Fixture()
    fixture.run(0, [0, 1])
    fixture.run(0, chunks, dead=dead)
    fixture.run(0, [2, 2])  # the third is not recorded any more
    assert fixture.told == [(0, accesses([0, 1])), (0, accesses(chunks, dead))]


def test_passes_of_other_traces_and_passes_that_fail_count_for_none() -> None:
    fixture = Fixture()
    fixture.run(0, [0, 1])
    fixture.run(1, [2])
    fixture.run(0, [2], fails=True)
    fixture.run(0, [1])
    assert fixture.told == [(0, accesses([0, 1])), (1, accesses([2])), (0, accesses([1]))]


def test_a_pass_that_asks_for_nothing_is_told_nobody() -> None:
    fixture = Fixture()
    fixture.run(0, [])
    assert fixture.told == []
    fixture.run(0, [1])
    fixture.run(0, [2])
    assert fixture.told == [(0, accesses([1]))]


def test_a_trace_that_somebody_set_is_not_recorded() -> None:
    fixture = Fixture()
    fixture.store.set_trace(0, accesses([1]))
    fixture.run(0, [2])
    assert fixture.told == [(0, accesses([1]))]

"""The order in which objects leave, and what it knows of them."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from io_daemon.policy import eviction
from io_daemon.policy.cursor import UNKNOWN_USE, Cursor
from io_daemon.policy.eviction import STREAMING, WORTHLESS, EvictionOrder, rank_of
from io_daemon.policy.swap_object import SwapObject


def objects(num: int) -> list[SwapObject]:
    return [SwapObject(object_id=each, object_bytes=4096, num_frames=1) for each in range(num)]


def test_it_knows_whether_something_in_it_is_to_be_written() -> None:
    order = EvictionOrder(Cursor())
    clean, dirty, other = objects(3)
    for each in (dirty, other):
        each.note_written()
    known = []
    order.push(clean)
    known.append(order.has_dirty)
    order.push(dirty)
    order.push(other)
    order.push(dirty)  # ranked anew
    known.append(order.has_dirty)
    order.discard(other)
    order.discard(other)
    known.append(order.has_dirty)
    assert {order.pop_above(-1), order.pop_above(-1)} == {clean, dirty}
    known.append(order.has_dirty)
    assert order.pop_above(-1) is None
    order.push(dirty)
    order.rank_anew()
    known.append(order.has_dirty)
    order.dismantle()
    known.append(order.has_dirty)
    assert known == [False, True, True, False, True, False]


NOW = 1000


@pytest.mark.parametrize(
    ("change", "rank"),
    [
        ({}, NOW + 40),
        ({"dirty": True}, NOW + 30),
        ({"dirty": True, "next_use": UNKNOWN_USE - NOW}, UNKNOWN_USE - NOW),
        ({"overwritten": True}, WORTHLESS),
        ({"overwritten": True, "dirty": True}, NOW + 30),
        ({"kept": False}, STREAMING + NOW + 40),
        ({"kept": False, "dirty": True}, STREAMING + NOW + 40),
        ({"kept": False, "overwritten": True}, WORTHLESS),
        ({"claims": {7: False}}, NOW),
        ({"claims": {7: True}, "dirty": True, "overwritten": True, "kept": False}, NOW),
    ],
    ids=str,
)
def test_what_an_object_ranks_by(change: dict[str, Any], rank: int) -> None:
    """What a lease waits for goes last, what is to be written a quarter later, what the plan does not keep first."""
    item = SwapObject(object_id=0, object_bytes=4096, num_frames=1, next_use=NOW + 40)
    for name, value in change.items():
        if name == "dirty":
            item.note_written()
        else:
            setattr(item, name, value)
    assert rank_of(item, NOW) == rank


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=10)
def test_objects_leave_by_rank_however_often_they_were_ranked(rng: random.Random) -> None:
    """Also just after the entries that died meanwhile have been cleared out, which are more than a hundred."""
    order, items = EvictionOrder(Cursor()), objects(20)
    for item in [*items, *rng.choices(items, k=rng.randrange(84, 110))]:
        item.next_use = rng.randrange(1000)
        order.push(item)
    left = []
    while (leaving := order.pop_above(-1)) is not None:
        left.append(leaving.next_use)
    assert left == sorted([item.next_use for item in items], reverse=True)


def test_whoever_leaves_leaves_by_what_is_predicted_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often predictions change before all are ranked anew, nobody leaves by an older one."""
    monkeypatch.setattr(eviction, "SLICE", 3)
    rng = random.Random(5)
    cursor = Cursor()
    predicted: dict[int, int] = {}

    def refresh(item: SwapObject) -> None:
        item.next_use = predicted[item.object_id]

    monkeypatch.setattr(cursor, "refresh", refresh)
    for _ in range(200):
        order, items = EvictionOrder(cursor), objects(12)
        predicted.update({item.object_id: rng.randrange(100) for item in items})
        for item in items:
            order.push(item)
        left: list[SwapObject] = []
        while len(order):
            if rng.random() < 0.5:
                predicted.update({item.object_id: rng.randrange(100) for item in items})
                order.rank_anew()
            least = rng.randrange(-1, 100)
            leaving = order.pop_above(least)
            staying = [predicted[item.object_id] for item in items if item in order]
            if leaving is None:
                assert max(staying) <= least, "all are ranked before there is said to be none"
            else:
                left.append(leaving)
                assert predicted[leaving.object_id] == leaving.next_use > least
        assert sorted(item.object_id for item in left) == list(range(12))

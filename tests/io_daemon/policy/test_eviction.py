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
from io_daemon.shared.states import ObjectFlags


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


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_what_leaves_soon_and_is_dirty_is_found_whatever_was_passed_before(rng: random.Random) -> None:
    """The one of the highest rank, if fewer frames of others leave before it than are asked for."""
    order, items = EvictionOrder(Cursor()), objects(12)
    for item in items:
        item.num_frames = rng.randrange(1, 3)
    for _ in range(60):
        item = rng.choice(items)
        match rng.randrange(4):
            case 0:
                order.discard(item)
                item.next_use, item.overwritten = rng.randrange(100), rng.random() < 0.2
                item.note_written() if rng.random() < 0.4 else item.note_swapped_out()
                order.push(item)
            case 1:
                order.discard(item)
            case 2:
                leaving = order.pop_above(rank := rng.randrange(-1, 100))
                staying = [rank_of(each, 0) for each in items if each in order]
                assert max(staying, default=-1) <= (rank if leaving is None else rank_of(leaving, 0))
            case 3:
                if rng.random() < 0.1:
                    order.rank_anew()
                there = sorted((each for each in items if each in order), key=lambda each: -rank_of(each, 0))
                num_frames, rank = rng.randrange(1, 12), rng.randrange(-1, 80)
                found = order.pop_to_write(num_frames, rank)
                to_write = [each for each in there if each.flags & ObjectFlags.DIRTY and not each.overwritten]
                before = sum(
                    each.num_frames for each in there if to_write and rank_of(each, 0) > rank_of(to_write[0], 0)
                )
                if found is None:
                    assert not to_write or rank_of(to_write[0], 0) <= rank or before >= num_frames
                else:
                    assert (rank_of(found, 0), found in order) == (rank_of(to_write[0], 0), False)
                    assert rank_of(found, 0) > rank


def test_what_was_passed_is_passed_again_once_it_was_ranked_anew() -> None:
    """And what has something to write beyond as many frames as are asked for stays."""
    order, (first, second, dirty) = EvictionOrder(Cursor()), objects(3)
    dirty.note_written()
    for item, next_use in ((first, 90), (second, 80), (dirty, 70)):
        item.next_use = next_use
        order.push(item)
    assert order.pop_to_write(2, -1) is None
    order.rank_anew()
    assert order.pop_to_write(2, -1) is None
    assert order.pop_above(-1) is first
    assert order.pop_to_write(2, 200) is None, "it ranks too low"
    assert order.pop_to_write(2, -1) is dirty
    assert (order.pop_above(-1), order.pop_above(-1)) == (second, None)


def test_what_was_asked_for_since_it_was_ranked_leaves_last() -> None:
    order, (asked, other) = EvictionOrder(Cursor()), objects(2)
    asked.next_use, other.next_use = 90, 80
    for item in (asked, other):
        order.push(item)
    asked.claims[1] = False
    assert [order.pop_above(-1) for _ in range(3)] == [other, asked, None]

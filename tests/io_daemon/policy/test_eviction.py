"""The order in which objects leave, and what it knows of them."""

from __future__ import annotations

import random

import pytest

from io_daemon.policy import eviction
from io_daemon.policy.cursor import Cursor
from io_daemon.policy.eviction import EvictionOrder
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

"""The order in which objects leave, and what it knows of them."""

from __future__ import annotations

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

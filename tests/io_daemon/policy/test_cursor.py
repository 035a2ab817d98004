"""The place in a trace step by step: what is skipped, when it is found again, and what is predicted on the way."""

from __future__ import annotations

import numpy as np
import pytest

from io_daemon.policy.cursor import RESYNC_LOOK_AHEAD, STRAYS_MAX, UNKNOWN_USE, UNPLANNED, Cursor
from io_daemon.policy.residency import PlanRequest, plan
from io_daemon.policy.swap_object import SwapObject
from io_daemon.policy.trace import Trace
from io_daemon.shared.protocol import KINDS_MAX, Access


def cursor_on(accesses: list[Access], num_frames: int = 4) -> Cursor:
    cursor = Cursor()
    num_objects = (max(access.chunk for access in accesses) + 1) * KINDS_MAX
    frames = np.ones(num_objects, dtype=np.uint8)
    assert cursor.start_pass(plan(PlanRequest(Trace.from_accesses(accesses), frames, num_frames)))
    return cursor


def item_of(chunk: int, kind: int = 0) -> SwapObject:
    return SwapObject(object_bytes=4096, num_frames=1, object_id=chunk * KINDS_MAX + kind, chunk=chunk, kind=kind)


def scan(num_chunks: int) -> list[Access]:
    return [Access(chunk, 1, 0, 0) for chunk in range(num_chunks)]


def advance(cursor: Cursor, access: Access) -> int:
    return cursor.advance(access.chunk, access.read_mask, access.write_mask)


@pytest.mark.parametrize(("skipped", "found"), [(RESYNC_LOOK_AHEAD - 1, True), (RESYNC_LOOK_AHEAD, False)])
def test_so_many_accesses_may_be_left_out_and_no_more(skipped: int, found: bool) -> None:
    accesses = scan(40)
    cursor = cursor_on(accesses)
    assert advance(cursor, accesses[skipped]) == (skipped if found else UNPLANNED)
    assert cursor.tick == (skipped + 1 if found else 0)
    following = accesses[cursor.tick]
    assert cursor.access_at(cursor.tick) == (following.chunk, 1, 0)


def test_an_access_is_the_same_only_with_both_masks() -> None:
    accesses = [Access(0, 1, 0, 0), Access(0, 0, 1, 0), Access(0, 1, 1, 0), Access(1, 1, 1, 0)]
    for index, access in enumerate(accesses):
        assert advance(cursor_on(accesses), access) == index


def test_strays_are_counted_in_a_row() -> None:
    accesses = scan(60)
    cursor = cursor_on(accesses)
    far = accesses[50]
    for _ in range(STRAYS_MAX - 1):
        assert advance(cursor, far) == UNPLANNED
    assert advance(cursor, accesses[0]) == 0, "it is back"
    for _ in range(STRAYS_MAX - 1):
        assert advance(cursor, far) == UNPLANNED
    assert advance(cursor, far) == 50
    for _ in range(STRAYS_MAX - 1):
        assert advance(cursor, accesses[20]) == UNPLANNED, "counted from nothing again"
    assert advance(cursor, accesses[20]) == 60 + 20, "of the next pass"
    assert cursor.tick == 81


def test_strays_that_are_nowhere_in_the_trace_leave_the_cursor_where_it_is() -> None:
    accesses = scan(4)
    cursor = cursor_on(accesses)
    for stray in (Access(9, 1, 0, 0), Access(0, 0, 1, 0), Access(0, 2, 0, 0), Access(4, 1, 0, 0)):
        for _ in range(2 * STRAYS_MAX):
            assert advance(cursor, stray) == UNPLANNED
        assert cursor.tick == 0
    assert advance(cursor, accesses[0]) == 0


def test_a_pass_forgets_the_strays_of_the_one_before() -> None:
    accesses = scan(60)
    cursor = cursor_on(accesses)
    for _ in range(STRAYS_MAX - 1):
        advance(cursor, accesses[50])
    cursor.start_pass(cursor.plan)
    assert advance(cursor, accesses[50]) == UNPLANNED


def test_the_occurrence_that_is_next_is_found_also_before_the_cursor() -> None:
    wanted = Access(0, 1, 0, 0)
    accesses = [wanted, *[Access(1, 1, 0, 0)] * 30, wanted, *[Access(1, 1, 0, 0)] * 30]
    cursor = cursor_on(accesses)
    for access in accesses[:33]:
        advance(cursor, access)
    found = [advance(cursor, wanted) for _ in range(STRAYS_MAX)]
    assert found[-1] == len(accesses)


def test_an_exact_number_of_passes_later_nothing_is_to_be_renewed() -> None:
    accesses = scan(3)
    cursor = cursor_on(accesses)
    made = cursor.plan
    for _ in range(2):
        for access in accesses:
            advance(cursor, access)
        assert not cursor.start_pass(made)
    advance(cursor, accesses[0])
    assert cursor.start_pass(made), "an access more"
    for access in accesses:
        advance(cursor, access)
    assert not cursor.start_pass(made), "counted from there"
    assert cursor.start_pass(None)
    assert cursor.plan is None
    assert cursor.start_pass(None), "without a plan every pass is new"


def test_without_a_plan_all_is_kept_and_nothing_known_to_be_overwritten() -> None:
    cursor, item = Cursor(), item_of(0)
    item.kept, item.overwritten = False, True
    cursor.predict(item, cursor.advance(0, 1, 0))
    assert (item.kept, item.overwritten, item.epoch) == (True, False, cursor.epoch)
    assert item.next_use == UNKNOWN_USE - 1
    assert item.last_use == 1


def test_a_guess_is_as_far_ahead_as_the_last_use_is_back() -> None:
    cursor, item = Cursor(), item_of(0)
    cursor.predict(item, cursor.advance(0, 1, 0))
    for _ in range(4):
        cursor.advance(1, 1, 0)
    cursor.predict(item, cursor.advance(0, 1, 0))
    assert (item.last_use, item.next_use) == (6, 11)
    cursor.refresh(item)
    assert item.next_use == 11, "it may still come"
    for _ in range(6):
        cursor.advance(1, 1, 0)
    item.kept = False
    cursor.refresh(item)
    assert (item.next_use, item.kept) == (UNKNOWN_USE - 6, True)


@pytest.mark.parametrize(("ahead", "holds"), [(1, True), (0, True), (-1, False)])
def test_without_a_plan_an_older_prediction_holds_until_it_is_past(ahead: int, holds: bool) -> None:
    cursor, item = Cursor(), item_of(0)
    for _ in range(5):
        cursor.advance(1, 1, 0)
    item.last_use, item.next_use = 2, cursor.tick + ahead
    cursor.refresh(item)
    assert item.next_use == (5 + ahead if holds else UNKNOWN_USE - 2)


def test_what_a_new_plan_does_not_name_is_of_no_known_use() -> None:
    cursor = cursor_on(scan(3))
    for item in (item_of(2, kind=1), item_of(7)):
        item.last_use, item.kept, item.overwritten = 0, False, True
        cursor.refresh(item)
        assert (item.next_use, item.kept, item.overwritten) == (UNKNOWN_USE, True, False)
        assert item.epoch == cursor.epoch


def test_a_prediction_that_holds_is_not_looked_up_again() -> None:
    cursor = cursor_on(scan(3))
    item = item_of(2)
    cursor.refresh(item)
    assert (item.next_use, item.epoch) == (2, cursor.epoch)
    item.next_use = 77
    cursor.refresh(item)
    assert item.next_use == 77
    item.next_use = cursor.tick
    cursor.refresh(item)
    assert item.next_use == cursor.tick, "now is not overdue"
    for access in scan(1):
        advance(cursor, access)
    cursor.refresh(item)
    assert item.next_use == 2, "overdue"
    item.epoch -= 1
    item.next_use = 77
    cursor.refresh(item)
    assert item.next_use == 2, "of another pass"


def test_a_stray_use_is_followed_by_the_first_in_the_trace() -> None:
    accesses = [Access(0, 1, 0, 0), Access(1, 0, 1, 0), Access(0, 0, 1, 0), Access(2, 1, 0, 0)]
    cursor = cursor_on(accesses)
    advance(cursor, accesses[0])
    item = item_of(0)
    tick = cursor.advance(0, 1, 1)
    assert tick == UNPLANNED
    cursor.predict(item, tick)
    assert (item.next_use, item.overwritten, item.last_use) == (2, True, 1)
    advance(cursor, accesses[1])
    advance(cursor, accesses[2])
    cursor.predict(item, UNPLANNED)
    assert (item.next_use, item.overwritten) == (4, False), "of the next pass"


def test_what_is_kept_until_a_use_is_what_the_plan_kept_after_the_one_before() -> None:
    """Also across the end of the trace, and for each object by itself."""
    accesses = [Access(chunk, 1, 0, 0) for chunk in (0, 1, 2, 3, 4, 0, 1)]
    cursor = cursor_on(accesses, num_frames=2)
    made = cursor.plan
    assert made is not None
    assert 0 < made.kept.sum() < len(made.kept)
    for chunk in range(5):
        begin, end = int(made.first_use[chunk * KINDS_MAX]), int(made.first_use[chunk * KINDS_MAX + 1])
        item = item_of(chunk)
        cursor.refresh(item)
        assert item.kept == made.kept[end - 1], "before its first use: as after its last"
        if end - begin == 2:
            item.epoch = -1
            other = cursor_on(accesses, num_frames=2)
            for access in accesses[:3]:
                advance(other, access)
            other.refresh(item)
            assert item.kept == made.kept[begin]


def test_there_is_nothing_to_expect_without_a_plan() -> None:
    with pytest.raises(AssertionError):
        Cursor().access_at(0)


def test_a_pass_may_begin_at_any_tick() -> None:
    accesses = scan(40)
    cursor = Cursor()
    for _ in range(5):
        cursor.advance(0, 1, 0)
    made = cursor_on(accesses).plan
    assert cursor.start_pass(made)
    assert cursor.access_at(5 + 3) == (3, 1, 0)
    item = item_of(7)
    cursor.refresh(item)
    assert item.next_use == 5 + 7
    assert advance(cursor, accesses[0]) == 5
    used = item_of(0)
    cursor.predict(used, 5)
    assert used.next_use == 5 + 40
    assert [advance(cursor, accesses[30]) for _ in range(STRAYS_MAX)][-1] == 5 + 30
    for access in accesses[31:]:
        advance(cursor, access)
    assert not cursor.start_pass(made)
    assert cursor.tick == 45

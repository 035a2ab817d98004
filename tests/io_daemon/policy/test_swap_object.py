"""What each turn in an object's life does to its flags, as a table, for every set of flags that it may find."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.protocol import NO_EXTENT
from io_daemon.shared.states import UNASSIGNED, ObjectFlags

BORN, DIRTY, PINNED = ObjectFlags.BORN, ObjectFlags.DIRTY, ObjectFlags.PINNED
UNFILLED, DYING, PREFETCHED = ObjectFlags.UNFILLED, ObjectFlags.DYING, ObjectFlags.PREFETCHED
Flags = set[ObjectFlags]
SETS = [set(chosen) for count in range(len(ObjectFlags) + 1) for chosen in combinations(ObjectFlags, count)]
TURNS: dict[str, tuple[Callable[[SwapObject], object], Flags, Flags]] = {
    # name: what is called, flags that come, flags that go
    "pin": (lambda item: item.pin(), {PINNED}, set()),
    "take_frames": (lambda item: item.take_frames([7, 8]), {UNFILLED}, set()),
    "give_up_frames": (lambda item: item.give_up_frames(), set(), {UNFILLED, PREFETCHED}),
    "note_prefetch": (lambda item: item.note_prefetch(), {PREFETCHED}, set()),
    "note_use": (lambda item: item.note_use(), set(), {PREFETCHED}),
    "note_swapped_in": (lambda item: item.note_swapped_in(), set(), {UNFILLED}),
    "note_swapped_out": (lambda item: item.note_swapped_out(), set(), {DIRTY}),
    "note_written": (lambda item: item.note_written(), {DIRTY}, {BORN, UNFILLED}),
    "doom": (lambda item: item.doom(), {DYING}, set()),
    "bury": (lambda item: item.bury(), {BORN, UNFILLED}, {DYING, DIRTY}),
}


def made() -> SwapObject:
    return SwapObject(object_bytes=8192, num_frames=2)


def with_flags(flags: Flags) -> SwapObject:
    item = made()
    item.flags = sum(flags)
    return item


def flags_of(item: SwapObject) -> Flags:
    return {flag for flag in ObjectFlags if item.flags & flag}


@pytest.mark.parametrize("turn", TURNS)
def test_flags_come_and_go_and_all_others_stay(turn: str) -> None:
    call, come, go = TURNS[turn]
    for before in SETS:
        item = with_flags(before)
        call(item)
        assert flags_of(item) == (before - go) | come, before


def test_what_a_lease_may_scribble_over_is_unfilled_unless_it_exists_nowhere_else() -> None:
    for before in SETS:
        item = with_flags(before)
        item.hand_over_unread()
        assert flags_of(item) == (before if DIRTY in before else before | {UNFILLED})


def test_every_way_in_which_flags_change_is_in_the_table() -> None:
    own = {name for name, value in vars(SwapObject).items() if callable(value) and not name.startswith("_")}
    assert own == {*TURNS, "hand_over_unread"}


def test_frames_are_given_up_as_they_were_taken() -> None:
    item = made()
    item.take_frames([9, 4])
    assert item.frames == (9, 4, *UNASSIGNED[2:])
    assert item.give_up_frames() == (9, 4)
    assert item.frames == UNASSIGNED


def test_a_version_lies_where_its_extent_is_and_none_does_once_it_is_buried() -> None:
    item = made()
    item.extent_offset, item.version = 8192, 0xFFFF_FFFE
    versions = []
    for _ in range(3):
        item.note_swapped_out()
        versions.append(item.version)
    assert versions == [0xFFFF_FFFF, 0, 1]
    assert item.committed_offset == 8192
    item.bury()
    assert (item.committed_offset, item.extent_offset) == (NO_EXTENT, 8192)

"""States, their transitions, and the record that mirrors the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import IntEnum

import pytest

from io_daemon.shared.protocol import FRAMES_PER_OBJECT_MAX, NO_FRAME
from io_daemon.shared.states import (
    FRAME_STATE_OF,
    OBJECT_TRANSITIONS,
    TENANT_TRANSITIONS,
    UNASSIGNED,
    FrameState,
    ObjectFlags,
    ObjectRecord,
    ObjectState,
    TenantState,
    transition,
)
from tests.support.fake_disk import FRAME_TRANSITIONS

TABLES: list[tuple[type[IntEnum], Mapping[IntEnum, frozenset[IntEnum]]]] = [
    (ObjectState, OBJECT_TRANSITIONS),  # type: ignore[list-item]
    (FrameState, FRAME_TRANSITIONS),  # type: ignore[list-item]
    (TenantState, TENANT_TRANSITIONS),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("states", "transitions"), TABLES)
def test_every_pair_is_decided(states: type[IntEnum], transitions: Mapping[IntEnum, frozenset[IntEnum]]) -> None:
    assert set(transitions) == set(states)
    for current in states:
        for new in states:
            if new in transitions[current]:
                assert transition(transitions, current, new) is new
            else:
                with pytest.raises(AssertionError, match=f"{current.name} -> {new.name}"):
                    transition(transitions, current, new)


@pytest.mark.parametrize(("states", "transitions"), TABLES)
def test_every_state_can_be_reached(states: type[IntEnum], transitions: Mapping[IntEnum, frozenset[IntEnum]]) -> None:
    reached = {states(0)}
    while more := {new for state in reached for new in transitions[state]} - reached:
        reached |= more
    assert reached == set(states)


def test_frames_may_follow_wherever_their_object_goes() -> None:
    for current, news in OBJECT_TRANSITIONS.items():
        for new in news:
            assert FRAME_STATE_OF[new] in FRAME_TRANSITIONS[FRAME_STATE_OF[current]], (current, new)


def test_flags_are_distinct_bits_of_a_byte() -> None:
    assert all(flag & (flag - 1) == 0 for flag in ObjectFlags)
    assert sum(ObjectFlags) < 1 << 8


def test_a_new_record_reads_as_zero_and_lives_nowhere() -> None:
    record = ObjectRecord(object_bytes=4096, num_frames=1)
    assert record.state is ObjectState.ABSENT
    assert record.flags == ObjectFlags.BORN
    assert record.frames == UNASSIGNED == (NO_FRAME,) * FRAMES_PER_OBJECT_MAX


def test_the_record_has_the_fields_of_the_wire() -> None:
    native = pytest.importorskip("io_daemon._native")
    assert {each.name for each in fields(ObjectRecord)} == set(native.WIRE_LAYOUT["ObjectRecord"]) - {""}

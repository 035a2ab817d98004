"""Memory and a disk that hold symbols instead of bytes, and notice what real ones would not forgive.

Every piece of an object has contents ``(object_id, version, piece)``, ``ZERO``, or unique garbage. ``FakeMemory`` is
the arena and the residency table in one: it checks that frames are never shared and that states change only as
allowed. ``FakeDisk`` carries out StartIo actions in any order, with errors; a frame that changes while the disk reads
it, or an extent that is used twice, is an AssertionError.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from io_daemon.policy.actions import StartIo
from io_daemon.shared.protocol import NO_OBJECT, IoEnd, Status
from io_daemon.shared.states import (
    OBJECT_TRANSITIONS,
    FrameState,
    ObjectRecord,
    ObjectState,
    transition,
)

# What an arena's frame may become; that it follows from OBJECT_TRANSITIONS is a test of its own.
FRAME_TRANSITIONS: Final[Mapping[FrameState, frozenset[FrameState]]] = {
    FrameState.FREE: frozenset({FrameState.FILLING, FrameState.HELD}),
    FrameState.FILLING: frozenset({FrameState.HELD}),
    FrameState.HELD: frozenset({FrameState.FILLING, FrameState.DRAINING, FrameState.FREE}),
    FrameState.DRAINING: frozenset({FrameState.HELD}),
}

Contents = tuple[int | str, int, int]
ZERO: Contents = ("zero", 0, 0)
_garbage = itertools.count()


def garbage() -> Contents:
    """Contents equal to no others."""
    return ("garbage", next(_garbage), 0)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


class FakeMemory:
    """Frames with symbolic contents, and the residency table (io_daemon.policy.actions.TableWriter)."""

    def __init__(self, num_frames: int) -> None:
        self.contents: list[Contents] = [garbage() for _ in range(num_frames)]
        self.owners: list[tuple[int, int]] = [(NO_OBJECT, 0)] * num_frames
        self.states: list[FrameState] = [FrameState.FREE] * num_frames
        self.records: dict[int, ObjectRecord] = {}

    def store_object(self, object_id: int, record: ObjectRecord) -> None:
        before = self.records.get(object_id)
        if before is not None and before.object_bytes and record.object_bytes and before.state is not record.state:
            transition(OBJECT_TRANSITIONS, before.state, record.state)
        copy = ObjectRecord(**{each.name: getattr(record, each.name) for each in fields(ObjectRecord)})
        _check(copy.num_writers <= 1, f"object {object_id}: {copy.num_writers} writers")
        _check(not (copy.num_writers and copy.num_readers), f"object {object_id}: readers beside a writer")
        self.records[object_id] = copy

    def store_frame(self, frame: int, object_id: int, piece: int, state: int) -> None:
        before, after = self.states[frame], FrameState(state)
        if before is not after:
            transition(FRAME_TRANSITIONS, before, after)
        if before is not FrameState.FREE and after is not FrameState.FREE:
            _check(
                self.owners[frame] == (object_id, piece), f"frame {frame} of {self.owners[frame]} given to {object_id}"
            )
        self.states[frame] = after
        self.owners[frame] = (object_id, piece)
        if after is FrameState.FREE:
            self.contents[frame] = garbage()

    def frames_of(self, object_id: int) -> tuple[int, ...]:
        record = self.records[object_id]
        return record.frames[: record.num_frames]

    def check_whole(self) -> None:
        """Every frame belongs to exactly the object whose record names it; the rest is free."""
        owned: dict[int, tuple[int, int]] = {}
        for object_id, record in self.records.items():
            if record.object_bytes == 0 or record.state is ObjectState.ABSENT:
                continue
            for piece, frame in enumerate(record.frames[: record.num_frames]):
                _check(frame not in owned, f"frame {frame} is shared by {object_id} and {owned.get(frame)}")
                owned[frame] = (object_id, piece)
        for frame, state in enumerate(self.states):
            if state is FrameState.FREE:
                _check(frame not in owned, f"frame {frame} is free and owned by {owned.get(frame)}")
            else:
                _check(owned.get(frame) == self.owners[frame], f"frame {frame} leaked: {self.owners[frame]}")


WELL: Final = IoEnd(Status.OK, 0, 0, 0, 0)


class FakeDisk:
    """Carries out I/O on a FakeMemory. ``start`` takes it in, ``finish`` ends it, in any order."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.contents: dict[tuple[int, int], Contents] = {}
        self.in_flight: dict[int, tuple[StartIo, Contents]] = {}
        self.bytes_read = 0
        self.bytes_written = 0
        self._busy: set[tuple[int, int]] = set()

    def start(self, action: StartIo) -> None:
        memory = self.memory
        _check(action.io_id not in self.in_flight, f"io_id {action.io_id} used twice")
        owner, _ = memory.owners[action.frame]
        _check(owner == action.object_id, f"I/O of object {action.object_id} on a frame of object {owner}")
        wanted = FrameState.DRAINING if action.write else FrameState.FILLING
        _check(memory.states[action.frame] is wanted, f"the table does not say what {action} does")
        place = (action.file, action.offset)
        _check(place not in self._busy, f"two I/Os at {place}")
        self._busy.add(place)
        if not action.write:
            memory.contents[action.frame] = garbage()
        else:
            self.contents[place] = garbage()
        self.in_flight[action.io_id] = (action, memory.contents[action.frame])

    def finish(self, io_id: int, outcome: IoEnd) -> StartIo:
        action, before = self.in_flight.pop(io_id)
        place = (action.file, action.offset)
        self._busy.discard(place)
        memory = self.memory
        _check(memory.contents[action.frame] == before, f"the frame of {action} changed under the I/O")
        _check(memory.owners[action.frame][0] == action.object_id, f"{action} outlived its object's hold on the frame")
        if action.write:
            if outcome.status == Status.OK:
                self.contents[place] = before
                self.bytes_written += action.num_bytes
        elif outcome.status == Status.OK:
            memory.contents[action.frame] = self.contents.get(place, before)
            self.bytes_read += action.num_bytes
        return action

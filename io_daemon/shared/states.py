"""States of objects, frames and tenants, their allowed transitions as data, and the record of one object.

Pure.  The values are what ``csrc/wire.hpp`` stores in the residency table.

===============  ==========================================  ==========================================
object state     frames                                      where the newest contents are
===============  ==========================================  ==========================================
ABSENT           none                                        on disk, or nowhere (BORN)
SWAPPING_IN      all; the kernel writes into them            on disk
RESIDENT         all                                         in the frames (not if UNFILLED); also on disk if not DIRTY
SWAPPING_OUT     all; the kernel reads them                  in the frames
===============  ==========================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeVar

from io_daemon.shared.protocol import FRAMES_PER_OBJECT_MAX, NO_EXTENT, NO_FRAME

UNASSIGNED: Final = (NO_FRAME,) * FRAMES_PER_OBJECT_MAX
"""``ObjectRecord.frames`` of an object that has none."""


class ObjectState(IntEnum):
    ABSENT = 0
    SWAPPING_IN = 1
    RESIDENT = 2
    SWAPPING_OUT = 3


class ObjectFlags(IntEnum):
    """Bits of ``ObjectRecord.flags``. (An IntEnum, so that ``&`` and ``|`` are those of int and cost nothing.)"""

    BORN = 1
    """Never written, or dead: it reads as zero and no bytes of it exist anywhere."""
    DIRTY = 2
    """The frames hold contents that the disk does not."""
    PINNED = 4
    """Never evicted, never written to disk."""
    UNFILLED = 8
    """The frames do not hold the contents: a write-only lease was given them as they were."""
    DYING = 16
    """A lease declared the contents dead; they go when the last granted lease and the last I/O are over."""
    PREFETCHED = 32
    """Swapped in ahead of its use, and not used yet."""


class FrameState(IntEnum):
    FREE = 0
    FILLING = 1
    """A swap-in writes into it."""
    HELD = 2
    """Belongs to a resident object."""
    DRAINING = 3
    """A swap-out reads from it."""


class TenantState(IntEnum):
    ATTACHED = 0
    """Connected; the arena is not mapped yet."""
    SERVING = 1
    DRAINING = 2
    """New leases are refused; I/O in flight runs out."""
    GONE = 3
    """The rank is dead or has left; only its I/O in flight remains."""
    RECLAIMED = 4
    """Frames, extents and files are given back."""


_State = TypeVar("_State", bound=IntEnum)

OBJECT_TRANSITIONS: Final[Mapping[ObjectState, frozenset[ObjectState]]] = {
    ObjectState.ABSENT: frozenset({ObjectState.SWAPPING_IN, ObjectState.RESIDENT}),
    ObjectState.SWAPPING_IN: frozenset({ObjectState.RESIDENT}),
    ObjectState.RESIDENT: frozenset({ObjectState.SWAPPING_IN, ObjectState.SWAPPING_OUT, ObjectState.ABSENT}),
    ObjectState.SWAPPING_OUT: frozenset({ObjectState.RESIDENT}),
}
TENANT_TRANSITIONS: Final[Mapping[TenantState, frozenset[TenantState]]] = {
    TenantState.ATTACHED: frozenset({TenantState.SERVING, TenantState.GONE}),
    TenantState.SERVING: frozenset({TenantState.DRAINING, TenantState.GONE}),
    TenantState.DRAINING: frozenset({TenantState.GONE}),
    TenantState.GONE: frozenset({TenantState.RECLAIMED}),
    TenantState.RECLAIMED: frozenset(),
}
FRAME_STATE_OF: Final[Mapping[ObjectState, FrameState]] = {
    ObjectState.ABSENT: FrameState.FREE,
    ObjectState.SWAPPING_IN: FrameState.FILLING,
    ObjectState.RESIDENT: FrameState.HELD,
    ObjectState.SWAPPING_OUT: FrameState.DRAINING,
}
"""The state of an object's frames follows from the object's."""


def transition(transitions: Mapping[_State, frozenset[_State]], current: _State, new: _State) -> _State:
    """``new``, if it may follow ``current``; AssertionError otherwise: the caller has a defect."""
    if new not in transitions[current]:
        raise AssertionError(f"{type(current).__name__}: {current.name} -> {new.name} is not allowed")
    return new


@dataclass(slots=True, eq=False)
class ObjectRecord:
    """One object in the residency table: twin of ``wire::ObjectRecord``, same names, same meaning."""

    object_bytes: int
    num_frames: int
    """How many frames it takes while it is not ABSENT (a constant of the object)."""
    file: int = 0
    checksum_index: int = 0
    frames: tuple[int, ...] = UNASSIGNED
    committed_offset: int = NO_EXTENT
    pending_offset: int = NO_EXTENT
    lease_seq: int = 0
    version: int = 0
    state: ObjectState = ObjectState.ABSENT
    flags: int = ObjectFlags.BORN
    num_readers: int = 0
    num_writers: int = 0

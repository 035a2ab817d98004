"""One object: one kind of one chunk. The only file in which an object's flags change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from io_daemon.shared.protocol import NO_EXTENT
from io_daemon.shared.states import UNASSIGNED, ObjectFlags, ObjectRecord

_BORN, _DIRTY, _PINNED = ObjectFlags.BORN, ObjectFlags.DIRTY, ObjectFlags.PINNED
_UNFILLED, _DYING, _PREFETCHED = ObjectFlags.UNFILLED, ObjectFlags.DYING, ObjectFlags.PREFETCHED


@dataclass(slots=True, eq=False)
class SwapObject(ObjectRecord):
    """An ``ObjectRecord`` and what only the policy knows of it."""

    object_id: int = 0
    chunk: int = 0
    kind: int = 0
    extent_offset: int = NO_EXTENT
    """Where it lives on disk, whether or not anything has been written there."""
    holds: int = 0
    """Leases that hold its frames; while there are any it is not evicted."""
    claims: dict[int, bool] = field(default_factory=dict)
    """Outstanding leases on it, granted or not, in order of issue: their seq, and whether they may write."""
    next_use: int = 0
    """Tick of its next use (see cursor.Cursor)."""
    overwritten: bool = False
    """The next use is write-only: today's contents are worth nothing then."""
    kept: bool = True
    """The plan wants it resident until its next use."""
    last_use: int = -1
    epoch: int = -1
    stamp: int = 0

    def pin(self) -> None:
        """It is never evicted and never written."""
        self.flags |= _PINNED

    def take_frames(self, pieces: Sequence[int]) -> None:
        """What the frames hold is not its contents."""
        self.frames = (*pieces, *UNASSIGNED[len(pieces) :])
        self.flags |= _UNFILLED

    def give_up_frames(self) -> tuple[int, ...]:
        pieces = self.frames[: self.num_frames]
        self.frames = UNASSIGNED
        self.flags &= ~(_UNFILLED | _PREFETCHED)
        return pieces

    def note_prefetch(self) -> None:
        self.flags |= _PREFETCHED

    def note_use(self) -> None:
        self.flags &= ~_PREFETCHED

    def note_swapped_in(self) -> None:
        self.flags &= ~_UNFILLED

    def note_swapped_out(self) -> None:
        self.flags &= ~_DIRTY
        self.committed_offset = self.extent_offset
        self.version = self.version + 1 & 0xFFFF_FFFF

    def hand_over_unread(self) -> None:
        """A lease that reads nothing may scribble into the frames: only contents that exist nowhere else count on."""
        if not self.flags & _DIRTY:
            self.flags |= _UNFILLED

    def note_written(self) -> None:
        """A lease left new contents in the frames."""
        self.flags = self.flags & ~(_BORN | _UNFILLED) | _DIRTY

    def doom(self) -> None:
        """A lease declared the contents dead; ``bury`` follows when nobody looks at them any more."""
        self.flags |= _DYING

    def bury(self) -> None:
        """The contents are no more: it is born again."""
        self.flags = self.flags & ~(_DYING | _DIRTY) | _BORN | _UNFILLED
        self.committed_offset = NO_EXTENT

"""Frames of one tenant and the swap-ins and swap-outs that go through them. Pure.

Every change of an object's state happens here, and is stored in the residency table in the same call, before the
StartIo actions that carry it out can reach anybody.
"""

from __future__ import annotations

from dataclasses import dataclass

from io_daemon.policy.actions import Hurry, StartIo, TableWriter
from io_daemon.policy.swap_object import SwapObject
from io_daemon.shared.protocol import KINDS_MAX, NO_EXTENT, NO_OBJECT, Cqe, IoEnd, Status
from io_daemon.shared.states import (
    FRAME_STATE_OF,
    OBJECT_TRANSITIONS,
    FrameState,
    ObjectFlags,
    ObjectRecord,
    ObjectState,
    transition,
)

_ABSENT, _SWAPPING_IN = ObjectState.ABSENT, ObjectState.SWAPPING_IN
_RESIDENT, _SWAPPING_OUT = ObjectState.RESIDENT, ObjectState.SWAPPING_OUT
_BORN, _DIRTY, _UNFILLED = ObjectFlags.BORN, ObjectFlags.DIRTY, ObjectFlags.UNFILLED


@dataclass(slots=True, eq=False)
class Transfer:
    """One object on its way in or out, as up to FRAMES_PER_OBJECT_MAX pieces."""

    item: SwapObject
    write: bool
    num_pieces_left: int
    moved_bytes: int = 0
    """Bytes of the pieces that succeeded."""
    failure: Cqe | None = None
    """The failure of the first piece that failed; seq is 0."""


class Transfers:
    """Owns the free frames. ``started`` collects actions for the caller to hand on."""

    def __init__(
        self, num_frames: int, frame_bytes: int, block_bytes: int, table: TableWriter, *, verify: bool
    ) -> None:
        self.free_frames = list(range(num_frames - 1, -1, -1))
        self.started: list[StartIo | Hurry] = []
        self.resident_bytes = [0] * KINDS_MAX
        self.frames_idle_out = 0
        """Frames of swap-outs that no lease holds: soon clean, and then free for the asking."""
        self._frame_bytes = frame_bytes
        self._checksums_per_frame = -(-frame_bytes // block_bytes)
        self._table = table
        self._verify = verify
        self._pieces: dict[int, tuple[Transfer, int]] = {}
        self._next_io_id = 1
        self._written_behind = False
        """Swap-outs that nobody waited for were started since the last ``hurry``."""

    @property
    def num_in_flight(self) -> int:
        """Pieces started and not yet finished."""
        return len(self._pieces)

    def store(self, item: SwapObject) -> None:
        self._table.store_object(item.object_id, item)

    def erase(self, item: SwapObject) -> None:
        """The object is no more: its record says that its chunk has no such kind."""
        self._table.store_object(item.object_id, ObjectRecord(object_bytes=0, num_frames=0))

    def hold(self, item: SwapObject) -> None:
        """A lease takes hold of the frames."""
        if item.holds == 0:
            self._count_idle(item, -item.num_frames)
        item.holds += 1

    def let_go(self, item: SwapObject) -> None:
        item.holds -= 1
        if item.holds == 0:
            self._count_idle(item, item.num_frames)

    def assign(self, item: SwapObject) -> None:
        """Free frames for an ABSENT object; what they hold is not its contents."""
        item.take_frames([self.free_frames.pop() for _ in range(item.num_frames)])
        self.resident_bytes[item.kind] += item.object_bytes
        self._enter(item, _RESIDENT)

    def drop(self, item: SwapObject) -> None:
        """The frames of a RESIDENT object become free; the caller has made sure that no contents are lost."""
        self._enter(item, _ABSENT)
        self.free_frames.extend(item.give_up_frames())
        self.resident_bytes[item.kind] -= item.object_bytes
        self.store(item)

    def swap_in(self, item: SwapObject, *, demand: bool) -> None:
        if item.committed_offset == NO_EXTENT or not item.flags & _UNFILLED or item.flags & (_BORN | _DIRTY):
            raise AssertionError(f"swap-in of object {item.object_id}, whose contents are not on disk alone")
        if not demand:
            item.note_prefetch()
        self._start(item, _SWAPPING_IN, item.committed_offset, demand=demand)

    def swap_out(self, item: SwapObject, *, demand: bool) -> None:
        """In place: while it runs, and if it fails, the disk holds no version of the object."""
        if not item.flags & _DIRTY or item.flags & _UNFILLED or item.extent_offset == NO_EXTENT:
            raise AssertionError(f"swap-out of object {item.object_id}, which has nothing to write or nowhere to go")
        item.committed_offset = NO_EXTENT
        item.pending_offset = item.extent_offset
        self._written_behind |= not demand
        self._start(item, _SWAPPING_OUT, item.extent_offset, demand=demand)

    def hurry(self) -> None:
        """A lease waits for swap-outs under way, which may have been asked for when nobody did."""
        if self._written_behind:
            self.started.append(Hurry())
        self._written_behind = False

    def finish(self, io_id: int, end: IoEnd) -> Transfer | None:
        """One piece ended: its transfer, if this was the last piece. KeyError if no such piece is in flight."""
        transfer, num_bytes = self._pieces.pop(io_id)
        item = transfer.item
        if end.status == Status.OK:
            transfer.moved_bytes += num_bytes
        elif transfer.failure is None:
            transfer.failure = Cqe(0, chunk=item.chunk, file=item.file, kind=item.kind, **end._asdict())
        transfer.num_pieces_left -= 1
        if transfer.num_pieces_left:
            return None
        if item.holds == 0:
            self._count_idle(item, -item.num_frames)
        if not transfer.write:
            if transfer.failure is None:
                item.note_swapped_in()
        else:
            item.pending_offset = NO_EXTENT
            if transfer.failure is None:
                item.note_swapped_out()
        self._enter(item, _RESIDENT)
        return transfer

    def _start(self, item: SwapObject, state: ObjectState, offset: int, *, demand: bool) -> None:
        write = state is _SWAPPING_OUT
        self._enter(item, state)
        if item.holds == 0:
            self._count_idle(item, item.num_frames)
        transfer = Transfer(item, write, item.num_frames)
        for piece in range(item.num_frames):
            start = piece * self._frame_bytes
            num_bytes = min(self._frame_bytes, item.object_bytes - start)
            io_id = self._next_io_id
            self._next_io_id += 1
            self._pieces[io_id] = (transfer, num_bytes)
            self.started.append(
                StartIo(
                    io_id=io_id,
                    write=write,
                    object_id=item.object_id,
                    kind=item.kind,
                    frame=item.frames[piece],
                    file=item.file,
                    offset=offset + start,
                    num_bytes=num_bytes,
                    checksum_index=item.checksum_index + piece * self._checksums_per_frame,
                    verify=self._verify and not write,
                    demand=demand,
                )
            )

    def _enter(self, item: SwapObject, state: ObjectState) -> None:
        item.state = transition(OBJECT_TRANSITIONS, item.state, state)
        frame_state = FRAME_STATE_OF[state]
        owner = NO_OBJECT if frame_state is FrameState.FREE else item.object_id
        for piece in range(item.num_frames):
            self._table.store_frame(item.frames[piece], owner, piece, frame_state)
        self.store(item)

    def _count_idle(self, item: SwapObject, num_frames: int) -> None:
        if item.state is _SWAPPING_OUT:
            self.frames_idle_out += num_frames

"""One lease: what a rank asked for with one ACQUIRE, and how far it has come. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from io_daemon.policy.catalog import Chunk
from io_daemon.policy.swap_object import SwapObject


class LeaseState(IntEnum):
    QUEUED = 0
    """Waits for frames, in order of issue."""
    HELD = 1
    """Holds all its frames; waits for swap-ins, for earlier leases on the same objects, for a swap-out to end."""
    GRANTED = 2
    GONE = 3
    """Released, cancelled or failed."""


@dataclass(slots=True, eq=False)
class Lease:
    seq: int
    chunk: Chunk
    read_mask: int
    write_mask: int
    objects: tuple[SwapObject, ...]
    """Those named by either mask, by ascending kind."""
    num_frames: int
    """What the objects take together, pinned ones not counted."""
    state: LeaseState = LeaseState.QUEUED
    held_mask: int = 0
    """Kinds whose frames it holds."""
    overtook: bool = False
    """It was given its frames before an earlier lease that is short of frames."""

    def blocked_on(self, item: SwapObject) -> bool:
        """An earlier outstanding lease on ``item`` excludes this one."""
        mine = self.write_mask >> item.kind & 1
        for seq, writes in item.claims.items():
            if seq == self.seq:
                return False
            if mine or writes:
                return True
        return False

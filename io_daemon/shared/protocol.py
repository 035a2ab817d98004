"""Opcodes, status codes and object kinds: the part of the wire that Python and C++ both name.

Pure.  ``tests/io_daemon/shared/test_wire.py`` holds this file against ``csrc/wire.hpp``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

PROTOCOL_VERSION: Final = 4
PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
KINDS_MAX: Final = 8
FRAMES_PER_OBJECT_MAX: Final = 4
LEASES_MAX: Final = 4096
"""Outstanding leases of one tenant; one more is refused."""
NO_FRAME: Final = 0xFFFF_FFFF
NO_EXTENT: Final = 0xFFFF_FFFF_FFFF_FFFF
NO_OBJECT: Final = 0xFFFF_FFFF_FFFF_FFFF


class Opcode(IntEnum):
    ECHO = 0
    """Answered at once with the same seq; measures the round trip."""
    ACQUIRE = 1
    """Ask for a lease on kinds of a chunk; answered when they are resident."""
    RELEASE = 2
    """Give a lease back, naming dirty and dead kinds; answered only on error."""
    MARK = 3
    """A pass over trace ``arg`` begins: the cursor goes to 0. No answer."""


class Status(IntEnum):
    OK = 0
    BAD_REQUEST = 1
    """Malformed or out-of-range SQE; nothing was done."""
    IO_ERROR = 2
    SHORT_IO = 3
    INTEGRITY = 4
    """A block's checksum differs: expected and actual are in the CQE."""
    SHUTTING_DOWN = 5


class ObjectKind(IntEnum):
    """What a chunk holds. To the daemon these are only indices; names serve reports."""

    WEIGHT = 0
    GRAD = 1
    MASTER = 2
    STATE_0 = 3
    """The optimizer's first state; what it is called is known to the rank alone."""
    STATE_1 = 4
    STATE_2 = 5
    STATE_3 = 6
    STAGING = 7
    """Shards of a model under construction (``infinity.Init``), before its layout is known."""

    @property
    def mask(self) -> int:
        return 1 << self.value


STATE_KINDS: Final = (ObjectKind.STATE_0, ObjectKind.STATE_1, ObjectKind.STATE_2, ObjectKind.STATE_3)
"""For an optimizer's states, in its own order."""


class Sqe(NamedTuple):
    """A submission: ``wire::Sqe``, in the order in which the ring pops it."""

    seq: int
    opcode: int
    flags: int
    read_mask: int
    write_mask: int
    chunk: int
    arg: int
    dirty_mask: int = 0
    dead_mask: int = 0


class Cqe(NamedTuple):
    """An answer: ``wire::Cqe``, in the order in which the ring pops it."""

    seq: int
    status: int
    error_number: int = 0
    chunk: int = 0
    file: int = 0
    kind: int = 0
    born_mask: int = 0
    offset: int = 0
    expected: int = 0
    actual: int = 0


class IoEnd(NamedTuple):
    """How an I/O ended, as ``Reactor.reap`` says it behind the tag."""

    status: int
    error_number: int
    offset: int
    expected: int
    actual: int


class Access(NamedTuple):
    """One entry of an access trace, in the order in which a step acquires."""

    chunk: int
    read_mask: int
    write_mask: int
    dead_mask: int
    """Kinds whose contents are dead once this lease is released."""


class ChunkSpec(NamedTuple):
    """Sizes of one chunk's objects, bytes per kind, 0 where the chunk has no such kind."""

    object_bytes: tuple[int, ...]
    pinned_mask: int = 0
    """Kinds that stay resident for good (the ``cpu`` tier): never written to disk, no extent."""


def kinds_of(mask: int) -> tuple[int, ...]:
    """Indices of the bits set in ``mask``, ascending."""
    return tuple(kind for kind in range(KINDS_MAX) if mask >> kind & 1)


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def checksums_per_object(frame_bytes: int, block_bytes: int) -> int:
    """Checksums reserved for one object. Object ``i`` owns ``[i * n, (i + 1) * n)``: its place needs no allocator."""
    return FRAMES_PER_OBJECT_MAX * -(-frame_bytes // block_bytes)

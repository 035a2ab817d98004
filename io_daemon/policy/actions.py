"""What the policy asks of the shell around it: actions to perform, and the table in which it keeps the truth. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from io_daemon.shared.protocol import Cqe
from io_daemon.shared.states import ObjectRecord


@dataclass(frozen=True, slots=True)
class StartIo:
    """Move one piece of one object between its frame and its swap file; report the end with ``on_io_done``."""

    io_id: int
    write: bool
    object_id: int
    kind: int
    frame: int
    file: int
    offset: int
    """In the swap file, as its ExtentAllocator counts: whoever owns the file allocates the header's page first."""
    num_bytes: int
    """A multiple of PAGE_BYTES, at most frame_bytes."""
    checksum_index: int
    """The place of the piece's first block among the table's checksums."""
    verify: bool
    demand: bool
    """A lease waits for it (rather than prefetch or write-behind)."""


@dataclass(frozen=True, slots=True)
class Hurry:
    """A lease has come to wait for write-behind that was asked for earlier: what of it has not been started is on
    demand from now on."""


Action = StartIo | Hurry | Cqe
"""A ``Cqe`` is to be pushed."""


class TableWriter(Protocol):
    """The residency table. Intent is stored before the StartIo that carries it out is returned, the outcome when
    ``on_io_done`` is told of it. ``record`` is the scheduler's own, live object: copy what it says, keep nothing."""

    def store_object(self, object_id: int, record: ObjectRecord) -> None: ...

    def store_frame(self, frame: int, object_id: int, piece: int, state: int) -> None: ...

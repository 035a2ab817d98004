"""The residency table: what is where, in shared memory, written by the daemon alone.

Memfd layout: ``TableHeader | objects[chunks_max * KINDS_MAX] | frames[num_frames] | checksums[checksums_max]``. Unused
parts are sparse, so limits cost address space and no memory. The daemon maps the table writable and then seals it
against every further writable mapping: a rank can read the truth and cannot change it. Offsets of extents count from
the first byte after a swap file's header page.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import Region
from io_daemon.errors import ConfigError, ProtocolError
from io_daemon.shared.arena import SEALS
from io_daemon.shared.protocol import KINDS_MAX, NO_OBJECT, PAGE_BYTES, PROTOCOL_VERSION, align_up, checksums_per_object
from io_daemon.shared.states import FrameState, ObjectRecord
from io_daemon.shared.wire import FRAME_RECORD, OBJECT_RECORD, TABLE_HEADER, TABLE_MAGIC

F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; the fcntl module does not name it
CHECKSUM_BYTES: Final = 4
CHECKSUM_INDEXES_MAX: Final = 1 << 32

_OBJECT = OBJECT_RECORD.codec
_FRAME = FRAME_RECORD.codec
_NUM_CHUNKS = struct.Struct("<I")


@dataclass(frozen=True)
class TableGeometry:
    """Where each array lies; plain arithmetic on the limits."""

    num_frames: int
    frame_bytes: int
    block_bytes: int
    chunks_max: int

    def __post_init__(self) -> None:
        if self.checksums_max > CHECKSUM_INDEXES_MAX:
            raise ConfigError(
                "io_daemon.block_size",
                self.block_bytes,
                f"{self.chunks_max} chunks of {self.frame_bytes}-byte frames come to more than {CHECKSUM_INDEXES_MAX} "
                "checksums: use larger blocks, or fewer chunks",
            )

    @property
    def checksums_max(self) -> int:
        return self.chunks_max * KINDS_MAX * checksums_per_object(self.frame_bytes, self.block_bytes)

    @property
    def objects_offset(self) -> int:
        return PAGE_BYTES

    @property
    def frames_offset(self) -> int:
        return self.objects_offset + self.chunks_max * KINDS_MAX * OBJECT_RECORD.num_bytes

    @property
    def checksums_offset(self) -> int:
        return align_up(self.frames_offset + self.num_frames * FRAME_RECORD.num_bytes, PAGE_BYTES)

    @property
    def table_bytes(self) -> int:
        return align_up(self.checksums_offset + self.checksums_max * CHECKSUM_BYTES, PAGE_BYTES)


class Table:
    """The daemon's side: the ``TableWriter`` that a scheduler keeps its truth in."""

    def __init__(self, geometry: TableGeometry, job: str, rank: int) -> None:
        self.geometry = geometry
        fd = os.memfd_create("infinity-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, geometry.table_bytes)
            self.region = Region(fd, geometry.table_bytes, writable=True)
            self._bytes = self.region.array().data
            self._write_header(job, rank)
            free = _FRAME.pack(NO_OBJECT, 0, FrameState.FREE) * geometry.num_frames
            self._bytes[geometry.frames_offset : geometry.frames_offset + len(free)] = free
            # the mapping above stays writable, no other ever will be: a rank's fd could be reopened, not written
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS | F_SEAL_FUTURE_WRITE)
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            """Read-only: what the rank is sent."""
        finally:
            os.close(fd)
        self._objects_offset = geometry.objects_offset
        self._frames_offset = geometry.frames_offset

    def store_object(self, object_id: int, record: ObjectRecord) -> None:
        packed = _OBJECT.pack(
            *record.frames,
            record.committed_offset,
            record.pending_offset,
            record.object_bytes,
            record.lease_seq,
            record.checksum_index,
            record.version,
            record.file,
            record.state,
            record.flags,
            record.num_readers,
            record.num_writers,
            record.num_frames,
        )
        self._store(self._objects_offset + object_id * _OBJECT.size, packed)

    def store_frame(self, frame: int, object_id: int, piece: int, state: int) -> None:
        self._store(self._frames_offset + frame * _FRAME.size, _FRAME.pack(object_id, piece, state))

    def store_num_chunks(self, num_chunks: int) -> None:
        """How many chunks are registered."""
        self._store(TABLE_HEADER.offset_of("num_chunks"), _NUM_CHUNKS.pack(num_chunks))

    def _store(self, offset: int, packed: bytes) -> None:
        """In one copy, in which a byte that stays the same never is another: a rank may be reading where an object lies
        that it has leased, while something else about the object changes. (``pack_into`` writes zeros first.)"""
        self._bytes[offset : offset + len(packed)] = packed

    def checksum_offset(self, checksum_index: int) -> int:
        """Byte offset of a checksum in the table."""
        return self.geometry.checksums_offset + checksum_index * CHECKSUM_BYTES

    def close(self) -> None:
        """The mapping goes as well, whoever still holds this object."""
        os.close(self.fd)
        del self.region, self._bytes

    def _write_header(self, job: str, rank: int) -> None:
        geometry = self.geometry
        self._bytes[:PAGE_BYTES] = TABLE_HEADER.pack(
            {
                "magic": TABLE_MAGIC,
                "version": PROTOCOL_VERSION,
                "num_frames": geometry.num_frames,
                "frame_bytes": geometry.frame_bytes,
                "block_bytes": geometry.block_bytes,
                "chunks_max": geometry.chunks_max,
                "num_chunks": 0,
                "checksums_max": geometry.checksums_max,
                "objects_offset": geometry.objects_offset,
                "frames_offset": geometry.frames_offset,
                "checksums_offset": geometry.checksums_offset,
                "generation": 1,
                "job": job.encode(),
                "rank": rank,
            }
        )


class TableView:
    """The rank's side: reads, on a read-only mapping."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._bytes = region.array().data
        self.header = np.frombuffer(self._bytes, TABLE_HEADER.dtype, count=1)[0]
        if self.header["magic"] != TABLE_MAGIC or self.header["version"] != PROTOCOL_VERSION:
            raise ProtocolError("what the daemon sent is no residency table of this version")
        self._objects_offset = int(self.header["objects_offset"])

    def placement(self, chunk: int, kind: int) -> tuple[tuple[int, ...], int]:
        """(frames in byte order, object bytes) of one object."""
        record = _OBJECT.unpack_from(self._bytes, self._objects_offset + (chunk * KINDS_MAX + kind) * _OBJECT.size)
        return record[: record[-1]], record[6]

    def objects(self) -> NDArray[np.void]:
        """All object records, one row an object, live."""
        return self._array("objects_offset", OBJECT_RECORD.dtype, int(self.header["chunks_max"]) * KINDS_MAX)

    def frames(self) -> NDArray[np.void]:
        return self._array("frames_offset", FRAME_RECORD.dtype, int(self.header["num_frames"]))

    def _array(self, offset_field: str, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        return np.frombuffer(self._bytes, dtype, count=count, offset=int(self.header[offset_field]))

"""The access trace of one pass: what a rank acquires, in order. Pure data over numpy arrays.

A trace repeats: after its last access comes its first. ``to_bytes`` is the form in which traces are kept and carried:
little endian, versioned, with the geometry they were taken on, and a checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from io_daemon.shared.protocol import KINDS_MAX, Access, ChunkSpec

TRACE_MAGIC: Final = b"INFITRC1"
TRACE_VERSION: Final = 1
ACCESSES_MAX: Final = 1 << 28
ACCESSES_AT_ONCE: Final = 1 << 14
_HEADER: Final = struct.Struct("<8sIIQII")  # magic, version, has geometry, frame_bytes, num_chunks, num_accesses
_CHECKSUM: Final = struct.Struct("<I")


@dataclass(frozen=True)
class Geometry:
    """Sizes that a trace was taken on: bytes of a frame, and the spec of every chunk by id."""

    frame_bytes: int
    specs: tuple[ChunkSpec, ...]

    def kind_masks(self) -> NDArray[np.uint8]:
        """Kinds that each chunk has, uint8[num_chunks]."""
        masks = (sum(1 << kind for kind, size in enumerate(spec.object_bytes) if size) for spec in self.specs)
        return np.fromiter(masks, dtype=np.uint8, count=len(self.specs))


@dataclass(frozen=True, eq=False)
class Trace(Sequence[Access]):
    """A sequence of ``Access`` as four columns of the same length: chunk uint32, masks uint8."""

    chunk: NDArray[np.uint32]
    read_mask: NDArray[np.uint8]
    write_mask: NDArray[np.uint8]
    dead_mask: NDArray[np.uint8]
    geometry: Geometry | None = None

    @classmethod
    def from_accesses(cls, accesses: Sequence[Access], geometry: Geometry | None = None) -> Trace:
        """ValueError if a field does not fit its column (a negative chunk, a mask above 8 bits)."""
        table = np.array(accesses, dtype=np.int64).reshape(len(accesses), 4)
        if table.size and (table.min() < 0 or table[:, 0].max() >> 32 or table[:, 1:].max() >> KINDS_MAX):
            raise ValueError("an access has a negative field, a chunk above 32 bits or a mask above 8 bits")
        chunk, read_mask, write_mask, dead_mask = table.T
        return cls(
            np.ascontiguousarray(chunk, np.uint32),
            np.ascontiguousarray(read_mask, np.uint8),
            np.ascontiguousarray(write_mask, np.uint8),
            np.ascontiguousarray(dead_mask, np.uint8),
            geometry,
        )

    def __len__(self) -> int:
        return len(self.chunk)

    @overload
    def __getitem__(self, index: int) -> Access: ...
    @overload
    def __getitem__(self, index: slice) -> Trace: ...
    def __getitem__(self, index: int | slice) -> Access | Trace:
        columns = (self.chunk[index], self.read_mask[index], self.write_mask[index], self.dead_mask[index])
        if isinstance(index, slice):
            return Trace(*columns, self.geometry)
        return Access(*(int(value) for value in columns))

    def __iter__(self) -> Iterator[Access]:
        columns = (self.chunk, self.read_mask, self.write_mask, self.dead_mask)
        return map(Access, *(column.tolist() for column in columns))

    def touched_objects(self) -> NDArray[np.int64]:
        """Ids (chunk * KINDS_MAX + kind) of the objects that any access names, ascending. For a valid trace."""
        kind_masks = np.zeros(int(self.chunk.max(initial=0)) + 1, dtype=np.uint8)
        touched = self.read_mask | self.write_mask
        for start in range(0, len(self), ACCESSES_AT_ONCE):  # other threads have a turn in between
            piece = slice(start, start + ACCESSES_AT_ONCE)
            np.bitwise_or.at(kind_masks, self.chunk[piece], touched[piece])
        return np.flatnonzero(np.unpackbits(kind_masks, bitorder="little"))

    def validate(self, kind_masks: NDArray[np.uint8]) -> None:
        """ValueError, naming the first bad access, unless every access fits chunks with these kinds.

        kind_masks: uint8[num_chunks], 0 where there is no such chunk.
        """
        if not 0 < len(self) <= ACCESSES_MAX:
            raise ValueError(f"a trace of {len(self)} accesses; 1 to {ACCESSES_MAX} are allowed")
        touched = self.read_mask | self.write_mask
        in_range = self.chunk < len(kind_masks)
        has = np.zeros_like(touched)
        has[in_range] = kind_masks[self.chunk[in_range]]
        bad = ~in_range | (touched == 0) | ((touched & ~has) != 0) | ((self.dead_mask & ~touched) != 0)
        if bad.any():
            index = int(bad.argmax())
            raise ValueError(
                f"access {index} of the trace, {self[index]}: the chunk is unknown, lacks a kind, or no kind is named"
            )

    def to_bytes(self) -> bytes:
        specs = self.geometry.specs if self.geometry is not None else ()
        frame_bytes = self.geometry.frame_bytes if self.geometry is not None else 0
        has_geometry = int(self.geometry is not None)
        sizes = np.zeros((len(specs), KINDS_MAX), dtype="<u8")
        for row, spec in zip(sizes, specs, strict=True):
            row[: len(spec.object_bytes)] = spec.object_bytes
        body = b"".join(
            (
                _HEADER.pack(TRACE_MAGIC, TRACE_VERSION, has_geometry, frame_bytes, len(specs), len(self)),
                sizes.tobytes(),
                bytes(spec.pinned_mask for spec in specs),
                self.chunk.astype("<u4").tobytes(),
                self.read_mask.tobytes(),
                self.write_mask.tobytes(),
                self.dead_mask.tobytes(),
            )
        )
        return body + _CHECKSUM.pack(zlib.crc32(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Trace:
        """ValueError if the bytes are not a whole trace of a version that this code reads."""
        if len(data) < _HEADER.size + _CHECKSUM.size:
            raise ValueError(f"{len(data)} bytes are too few for a trace")
        magic, version, has_geometry, frame_bytes, num_chunks, num_accesses = _HEADER.unpack_from(data)
        if magic != TRACE_MAGIC or version != TRACE_VERSION:
            raise ValueError(f"not a trace of version {TRACE_VERSION}: magic {magic!r}, version {version}")
        body = memoryview(data)[: -_CHECKSUM.size]
        expected_bytes = _HEADER.size + num_chunks * (8 * KINDS_MAX + 1) + num_accesses * 7
        if len(body) != expected_bytes:
            raise ValueError(f"a trace of {len(body)} bytes; its header says {expected_bytes}")
        if zlib.crc32(body) != _CHECKSUM.unpack_from(data, len(body))[0]:
            raise ValueError("the trace is damaged: its checksum differs")
        offset = _HEADER.size

        def column(dtype: str, count: int) -> NDArray[np.generic]:
            nonlocal offset
            array = np.frombuffer(data, dtype, count, offset)
            offset += array.nbytes
            return array

        sizes = column("<u8", num_chunks * KINDS_MAX).reshape(num_chunks, KINDS_MAX).tolist()
        pinned = column("u1", num_chunks).tolist()
        specs = tuple(ChunkSpec(tuple(row), mask) for row, mask in zip(sizes, pinned, strict=True))
        return cls(
            column("<u4", num_accesses).astype(np.uint32),
            column("u1", num_accesses).astype(np.uint8),
            column("u1", num_accesses).astype(np.uint8),
            column("u1", num_accesses).astype(np.uint8),
            Geometry(frame_bytes, specs) if has_geometry else None,
        )

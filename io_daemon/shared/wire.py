"""The structs of ``csrc/wire.hpp`` as Python reads and writes them.

Each layout is declared once, as (field, format, count); the ``struct`` codec (one record at a time, fast) and the
numpy dtype (a whole array at once) are both derived from it. ``tests/io_daemon/shared/test_wire.py`` holds them
against the C++ side, field by field. Rings are not here: only the compiled core touches them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from io_daemon.shared.protocol import FRAMES_PER_OBJECT_MAX, PAGE_BYTES

TABLE_MAGIC: Final = int.from_bytes(b"INFITBL1", "little")
ARENA_MAGIC: Final = int.from_bytes(b"INFIARN1", "little")
SWAP_MAGIC: Final = int.from_bytes(b"INFISWP1", "little")

NUMPY_CODES: Final[Mapping[str, str]] = {"B": "u1", "H": "<u2", "I": "<u4", "Q": "<u8"}


class Layout:
    """One fixed little-endian struct. ``s`` fields are NUL-padded bytes, ``x`` is padding."""

    def __init__(self, fields: Sequence[tuple[str, str, int]]) -> None:
        self.fields = tuple(fields)
        self.codec = struct.Struct(
            "<" + "".join(f"{count}{code}" if count > 1 or code in "sx" else code for _, code, count in fields)
        )
        self.num_bytes = self.codec.size
        dtype_fields: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]] = []
        for name, code, count in fields:
            if code == "s":
                dtype_fields.append((name, f"S{count}"))
            elif code == "x":
                dtype_fields.append((name, f"V{count}"))
            elif count > 1:
                dtype_fields.append((name, NUMPY_CODES[code], (count,)))
            else:
                dtype_fields.append((name, NUMPY_CODES[code]))
        self.dtype: np.dtype[np.void] = np.dtype(dtype_fields)

    def pack(self, values: Mapping[str, int | bytes]) -> bytes:
        """All fields by name; every scalar field must be given."""
        return self.codec.pack(*(values[name] for name, code, _ in self.fields if code != "x"))

    def unpack(self, data: bytes) -> dict[str, int | bytes]:
        """Scalar and bytes fields by name. Layouts with array fields are read through ``dtype`` instead."""
        names = (name for name, code, _ in self.fields if code != "x")
        return dict(zip(names, self.codec.unpack(data[: self.num_bytes]), strict=True))

    def offset_of(self, field: str) -> int:
        fields = self.dtype.fields
        if fields is None or field not in fields:
            raise KeyError(field)
        return int(fields[field][1])


OBJECT_RECORD: Final = Layout(
    [
        ("frames", "I", FRAMES_PER_OBJECT_MAX),
        ("committed_offset", "Q", 1),
        ("pending_offset", "Q", 1),
        ("object_bytes", "Q", 1),
        ("lease_seq", "Q", 1),
        ("checksum_index", "I", 1),
        ("version", "I", 1),
        ("file", "H", 1),
        ("state", "B", 1),
        ("flags", "B", 1),
        ("num_readers", "H", 1),
        ("num_writers", "B", 1),
        ("num_frames", "B", 1),
    ]
)

FRAME_RECORD: Final = Layout([("object_id", "Q", 1), ("piece", "I", 1), ("state", "I", 1)])

TABLE_HEADER: Final = Layout(
    [
        ("magic", "Q", 1),
        ("version", "I", 1),
        ("num_frames", "I", 1),
        ("frame_bytes", "Q", 1),
        ("block_bytes", "Q", 1),
        ("chunks_max", "I", 1),
        ("num_chunks", "I", 1),
        ("checksums_max", "Q", 1),
        ("objects_offset", "Q", 1),
        ("frames_offset", "Q", 1),
        ("checksums_offset", "Q", 1),
        ("generation", "Q", 1),
        ("job", "s", 64),
        ("rank", "I", 1),
        ("pad", "x", PAGE_BYTES - 148),
    ]
)

ARENA_HEADER: Final = Layout(
    [
        ("magic", "Q", 1),
        ("version", "I", 1),
        ("num_frames", "I", 1),
        ("frame_bytes", "Q", 1),
        ("page_bytes", "I", 1),
        ("page_locked", "I", 1),
        ("pad", "x", PAGE_BYTES - 32),
    ]
)

SWAP_HEADER: Final = Layout(
    [
        ("magic", "Q", 1),
        ("version", "I", 1),
        ("rank", "I", 1),
        ("file_bytes", "Q", 1),
        ("frame_bytes", "Q", 1),
        ("created_ns", "Q", 1),
        ("owner_starttime", "Q", 1),
        ("owner_pid", "I", 1),
        ("file_index", "I", 1),
        ("boot_id", "s", 40),
        ("job", "s", 64),
        ("header_checksum", "I", 1),
        ("pad", "x", PAGE_BYTES - 164),
    ]
)

LAYOUTS: Final[Mapping[str, Layout]] = {
    "ObjectRecord": OBJECT_RECORD,
    "FrameRecord": FRAME_RECORD,
    "TableHeader": TABLE_HEADER,
    "ArenaHeader": ARENA_HEADER,
    "SwapHeader": SWAP_HEADER,
}

"""The structs of ``csrc/wire.hpp`` as Python reads and writes them.

Nothing is declared here: the layouts are those that the compiled core exports. The ``struct`` codec (one record at a
time, fast) and the numpy dtype (a whole array at once) of each are derived. Rings are not here: only the core touches
them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import numpy as np

from io_daemon._native import WIRE_CONSTANTS, WIRE_LAYOUT

TABLE_MAGIC: Final = WIRE_CONSTANTS["TABLE_MAGIC"]
ARENA_MAGIC: Final = WIRE_CONSTANTS["ARENA_MAGIC"]
SWAP_MAGIC: Final = WIRE_CONSTANTS["SWAP_MAGIC"]

STRUCT_CODES: Final[Mapping[int, str]] = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Layout:
    """One fixed little-endian struct of unsigned numbers; arrays of single bytes are NUL-padded text. What lies between
    the fields is padding."""

    def __init__(self, name: str) -> None:
        places = dict(WIRE_LAYOUT[name])
        self.num_bytes = places.pop("")[0]
        self.names = tuple(sorted(places, key=lambda field: places[field][0]))
        codec, dtypes, end = "<", [], 0
        for offset, num_bytes, item_bytes in (places[field] for field in self.names):
            is_text = item_bytes == 1 and num_bytes > 1
            count = num_bytes // item_bytes
            codec += f"{offset - end}x" + (f"{count}s" if is_text else f"{count}{STRUCT_CODES[item_bytes]}")
            dtypes.append(f"S{count}" if is_text else f"<u{item_bytes}" if count == 1 else f"{count}<u{item_bytes}")
            end = offset + num_bytes
        self.codec = struct.Struct(f"{codec}{self.num_bytes - end}x")
        self.dtype: np.dtype[np.void] = np.dtype(
            {
                "names": list(self.names),
                "formats": dtypes,
                "offsets": [places[field][0] for field in self.names],
                "itemsize": self.num_bytes,
            }
        )
        self._offsets = {field: places[field][0] for field in self.names}

    def pack(self, values: Mapping[str, int | bytes]) -> bytes:
        """All fields by name; layouts with array fields are written through ``codec`` or ``dtype`` instead."""
        return self.codec.pack(*(values[name] for name in self.names))

    def unpack(self, data: bytes) -> dict[str, int | bytes]:
        """Scalar and text fields by name. Layouts with array fields are read through ``dtype`` instead."""
        return dict(zip(self.names, self.codec.unpack(data[: self.num_bytes]), strict=True))

    def offset_of(self, field: str) -> int:
        """Raises KeyError if there is no such field."""
        return self._offsets[field]


OBJECT_RECORD: Final = Layout("ObjectRecord")
FRAME_RECORD: Final = Layout("FrameRecord")
TABLE_HEADER: Final = Layout("TableHeader")
ARENA_HEADER: Final = Layout("ArenaHeader")
SWAP_HEADER: Final = Layout("SwapHeader")

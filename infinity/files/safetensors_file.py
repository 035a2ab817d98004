"""Safetensors: eight bytes that say how long the header is, a header in JSON, and the bytes of all tensors.

Parts are read by their place, without a mapping: pages of a mapped file count as this process's memory, and a disk that
fails under one ends the process.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from infinity.errors import DeviceIOError, WeightsFileError
from infinity.files.entry import Entry, WeightsFile
from infinity.files.pieces import bytes_of

HEADER_BYTES_MAX: Final = 100_000_000
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_REMEDY: Final = "copy or download it again"


class SafetensorsFile(WeightsFile):
    """Raises WeightsFileError for what is no whole file of this format, DeviceIOError where the disk fails."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        header, start = _read_header(path, self._identity[2])
        self._entries: dict[str, Entry] = {}
        self._offsets: dict[str, int] = {}
        for name, value in header.items():
            if name == "__metadata__":
                continue
            entry, begin, end = _entry(path, name, value)
            if start + end > self._identity[2]:
                raise WeightsFileError(
                    path, f"is truncated: {self._identity[2]} bytes, and {name} ends at {start + end}", _REMEDY
                )
            self._entries[name], self._offsets[name] = entry, start + begin
        self._check_places(start)

    def _check_places(self, start: int) -> None:
        """Tensors lie one behind another, up to the file's end: no byte is two tensors', and none is nobody's."""
        end = start
        for name in sorted(self._offsets, key=lambda name: (self._offsets[name], self._entries[name].nbytes)):
            if self._offsets[name] != end:
                raise WeightsFileError(
                    self.path, f"is damaged: {name} begins at {self._offsets[name]}, and {end} is free", _REMEDY
                )
            end += self._entries[name].nbytes
        if end != self._identity[2]:
            raise WeightsFileError(
                self.path, f"is damaged: it has {self._identity[2]} bytes, and its tensors end at {end}", _REMEDY
            )

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self._entries

    def read(self, name: str, first: int, numel: int) -> torch.Tensor:
        self.check_identity()
        values = torch.empty(numel, dtype=self._entries[name].dtype, device="cpu")
        offset = self._offsets[name] + first * values.element_size()
        with open(self.path, "rb", buffering=0) as file:
            _read_into(file.fileno(), self.path, bytes_of(values), offset)
        return values


def encode_header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The file's first bytes, and where each tensor begins, in the order given; data begins at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, entry in entries.items():
        header[name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, begin + entry.nbytes],
        }
        begin += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + header[name]["data_offsets"][0] for name in entries}
    return struct.pack("<Q", len(text)) + text, offsets


def in_order_of_alignment(names: Sequence[str], entries: Mapping[str, Entry]) -> list[str]:
    """Wider dtypes first, so that every tensor lies at a multiple of its element."""
    return sorted(names, key=lambda name: -entries[name].dtype.itemsize)


def _read_header(path: str, size_bytes: int) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    try:
        with open(path, "rb", buffering=0) as file:
            length_bytes = bytearray(8)
            if size_bytes < 8:
                raise WeightsFileError(path, f"is truncated: it has {size_bytes} bytes", _REMEDY)
            _read_into(file.fileno(), path, memoryview(length_bytes), 0)
            (length,) = struct.unpack("<Q", length_bytes)
            if length > HEADER_BYTES_MAX or 8 + length > size_bytes:
                raise WeightsFileError(
                    path, f"is truncated, or no safetensors file: a header of {length} bytes", _REMEDY
                )
            text = bytearray(length)
            _read_into(file.fileno(), path, memoryview(text), 8)
    except OSError as error:
        raise WeightsFileError.of(error, path, "read") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WeightsFileError(path, f"is no safetensors file: its header is no JSON ({error})", _REMEDY) from error
    if not isinstance(header, dict):
        raise WeightsFileError(path, "is no safetensors file: its header is no JSON object", _REMEDY)
    return header, 8 + length


def _entry(path: str, name: str, value: Any) -> tuple[Entry, int, int]:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            if dtype not in DTYPES:
                raise WeightsFileError(
                    path, f"has {name} in {dtype}, which torch does not know", "convert it to F32, F16 or BF16"
                )
            if all(isinstance(size, int) and size >= 0 for size in shape):
                entry = Entry(dtype=DTYPES[dtype], shape=tuple(shape))
                if begin >= 0 and end - begin == entry.nbytes:
                    return entry, begin, end
    raise WeightsFileError(path, f"is damaged: its header says {value!r} of {name}", _REMEDY)


def _read_into(descriptor: int, path: str, target: memoryview, offset: int) -> None:
    done = 0
    while done < len(target):
        try:
            num_read = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise _failed(error.errno or 0, path, offset, target, done) from error
        if num_read == 0:
            raise _failed(0, path, offset, target, done)
        done += num_read


def _failed(errno: int, path: str, offset: int, target: memoryview, done: int) -> DeviceIOError:
    return DeviceIOError(
        errno=errno, path=path, offset=offset, expected_bytes=len(target), actual_bytes=done, operation="read"
    )

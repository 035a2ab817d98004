"""Files of pieces: bytes one behind another, each piece with a checksum of its own."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

from infinity.checkpoint.descriptors import Descriptors
from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import DTYPES, PIECE_NUMEL_MAX, Piece
from infinity.checkpoint.sealed import checksum_of
from infinity.errors import CheckpointError
from infinity.files.direct import BlockWriter, read_block
from infinity.files.pieces import bytes_of, pieces


class PieceWriter:
    """Appends to a new file, which the drive writes meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: list[Piece] = []
        with disk_errors(path, "made"):
            self._file = BlockWriter(path)

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def add(self, tensor: str, kind: str, first: int, values: torch.Tensor) -> None:
        """Append ``values`` [numel], elements from ``first`` on of one kind of one tensor, at a multiple of their
        size."""
        data = bytes_of(values)
        with disk_errors(self.path, "written"):
            self._file.align(values.element_size())
            self.pieces.append(Piece(tensor, kind, first, values.numel(), self._file.num_bytes, checksum_of(data)))
            self._file.append(data)

    def add_all(self, tensor: str, kind: str, values: torch.Tensor) -> None:
        """Append one kind of one tensor, ``values`` [its numel], in pieces."""
        for first, numel in pieces(values.numel(), PIECE_NUMEL_MAX):
            self.add(tensor, kind, first, values[first : first + numel])

    def finish(self) -> None:
        """Have it all on the disk."""
        with disk_errors(self.path, "written"):
            self._file.finish()

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


class PieceFile:
    """Reads pieces, and checks each. Any thread may call it."""

    def __init__(self, path: Path, descriptors: Descriptors) -> None:
        self.path, self._descriptors = path, descriptors

    def read(self, piece: Piece, dtype: str) -> torch.Tensor:
        """The piece's elements. Raises CheckpointError if they are not what was written."""
        return self.check(piece, dtype, self.fetch(piece.offset, end_of(piece, dtype)))

    def fetch(self, begin: int, end: int, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Bytes [begin, end) of the file, fewer at its end; in ``memory`` where that is large enough."""
        with self._descriptors.of(self.path) as descriptor, disk_errors(self.path, "read"):
            return read_block(descriptor, begin, end, memory)

    def check(self, piece: Piece, dtype: str, data: torch.Tensor) -> torch.Tensor:
        """``data``, the piece's bytes, as its elements. Raises CheckpointError if they are not what was written."""
        size = piece.numel * DTYPES[dtype].itemsize
        place = f"{piece.kind} of {piece.tensor}, elements {piece.first} to {piece.first + piece.numel}"
        if data.numel() < size:
            raise CheckpointError(
                self.path,
                f"is cut short: {place} should be {size} bytes at offset {piece.offset}, {data.numel()} are there",
                "load another checkpoint, or copy this file anew",
            )
        found = checksum_of(bytes_of(data))
        if found != piece.checksum:
            raise CheckpointError(
                self.path,
                f"is damaged at offset {piece.offset} ({place}): checksum {found:08x}, written was "
                f"{piece.checksum:08x}",
                "load another checkpoint, or copy this file anew",
            )
        if piece.offset % DTYPES[dtype].itemsize:
            data = data.clone()  # written by a version that did not align
        return data.view(DTYPES[dtype])


def end_of(piece: Piece, dtype: str) -> int:
    """Where the piece ends in its file."""
    return piece.offset + piece.numel * DTYPES[dtype].itemsize

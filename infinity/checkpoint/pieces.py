"""Files of pieces: bytes one behind another, each piece with a checksum of its own."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from infinity.checkpoint.disk import disk_errors
from infinity.checkpoint.manifest import DTYPES, PIECE_NUMEL_MAX, Piece
from infinity.checkpoint.sealed import checksum_of
from infinity.errors import CheckpointError
from infinity.files.pieces import bytes_of, pieces

WINDOW_BYTES: Final = 16 << 20
"""The drive writes, or reads, so much behind or ahead of what is asked for."""


class PieceWriter:
    """Appends to a new file, which the drive writes meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: list[Piece] = []
        self.num_bytes = self._handed_over = 0
        with disk_errors(path, "made"):
            self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)

    def add(self, tensor: str, kind: str, first: int, values: torch.Tensor) -> None:
        """Append ``values`` [numel], elements from ``first`` on of one kind of one tensor."""
        view, done = bytes_of(values), 0
        self.pieces.append(Piece(tensor, kind, first, values.numel(), self.num_bytes, checksum_of(view)))
        with disk_errors(self.path, "written"):
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
        self.num_bytes += done
        if self.num_bytes - self._handed_over >= WINDOW_BYTES:
            # starts to write what is dirty, and drops what was written: nobody reads it soon
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._handed_over = self.num_bytes

    def add_all(self, tensor: str, kind: str, values: torch.Tensor) -> None:
        """Append one kind of one tensor, ``values`` [its numel], in pieces."""
        for first, numel in pieces(values.numel(), PIECE_NUMEL_MAX):
            self.add(tensor, kind, first, values[first : first + numel])

    def finish(self) -> None:
        """Have it all on the disk."""
        with disk_errors(self.path, "written"):
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self._descriptor)


class PieceFile:
    """Reads pieces, and checks each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._asked_for = 0
        with disk_errors(path, "opened"):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, piece: Piece, dtype: str) -> torch.Tensor:
        """The piece's elements. Raises CheckpointError if they are not what was written."""
        size = piece.numel * DTYPES[dtype].itemsize
        data = torch.empty(size, dtype=torch.uint8)
        view, done = bytes_of(data), 0
        self._ask_ahead(piece.offset + size)
        with disk_errors(self.path, "read"):
            while done < size and (got := os.preadv(self._descriptor, [view[done:]], piece.offset + done)):
                done += got
        place = f"{piece.kind} of {piece.tensor}, elements {piece.first} to {piece.first + piece.numel}"
        if done < size:
            raise CheckpointError(
                self.path,
                f"is cut short: {place} should be {size} bytes at offset {piece.offset}, {done} are there",
                "load another checkpoint, or copy this file anew",
            )
        found = checksum_of(view)
        if found != piece.checksum:
            raise CheckpointError(
                self.path,
                f"is damaged at offset {piece.offset} ({place}): checksum {found:08x}, written was "
                f"{piece.checksum:08x}",
                "load another checkpoint, or copy this file anew",
            )
        return data.view(DTYPES[dtype])

    def _ask_ahead(self, end: int) -> None:
        """Have the drive read what lies behind ``end``, unless it does: it is asked for next."""
        if not end <= self._asked_for - WINDOW_BYTES // 2 <= end + WINDOW_BYTES:
            begin = self._asked_for if end <= self._asked_for <= end + WINDOW_BYTES else end
            self._asked_for = end + WINDOW_BYTES
            os.posix_fadvise(self._descriptor, begin, self._asked_for - begin, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._descriptor)

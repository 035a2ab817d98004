"""New files of weights: all of their space reserved at once, then filled in any order, a piece at a time.

Whole pages go past the page cache; what pieces share of a page goes through it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from infinity.errors import WeightsFileError
from infinity.files.direct import ALIGNMENT, BLOCK_BYTES, WriteBehind, open_direct, write
from infinity.files.entry import Entry
from infinity.files.pieces import as_bytes
from infinity.files.safetensors_file import encode_header, in_order_of_alignment


class NewFile(ABC):
    """A file under construction. ``offsets``: where each tensor begins."""

    def __init__(
        self, path: Path, entries: Mapping[str, Entry], aliases: Mapping[str, str], behind: WriteBehind
    ) -> None:
        """``aliases``: other names of these tensors, for formats that know such. ``behind``: writes what ``write`` is
        given, also of other files. Raises WeightsFileError if there is no room for all of it."""
        self.path, self.entries, self.aliases, self._behind = path, entries, aliases, behind
        self._cached = self._direct = -1
        """Descriptors, while it is open."""
        with self._disk_errors():
            self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                self.offsets, size_bytes = self._lay_out()
                if size_bytes:
                    os.posix_fallocate(self._cached, 0, size_bytes)
            finally:
                self.close()

    @abstractmethod
    def _lay_out(self) -> tuple[Mapping[str, int], int]:
        """Write all but the tensors; where each begins, and the file's size."""

    def open(self) -> None:
        """Have descriptors, which ``write`` needs."""
        with self._disk_errors():
            self._cached = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            self._direct = open_direct(self.path, os.O_WRONLY)

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Elements from ``first`` on of a tensor, row-major, in the dtype that it was announced in."""
        entry = self.entries[name]
        if values.dtype is not entry.dtype or first + values.numel() > entry.numel:
            raise AssertionError(f"{name} was announced as {entry}, and {values.numel()} {values.dtype} came")
        data = as_bytes(values)
        offset = self.offsets[name] + first * values.element_size()
        begin = min(-offset % ALIGNMENT, data.numel())
        end = begin + (data.numel() - begin) // ALIGNMENT * ALIGNMENT
        with self._disk_errors():
            write(self.path, self._cached, data[:begin], offset)
            for start in range(begin, end, BLOCK_BYTES):
                part, block = data[start : min(start + BLOCK_BYTES, end)], self._behind.take()
                block[: part.numel()].copy_(part)
                self._behind.write(self.path, self._direct, block, part.numel(), offset + start)
            write(self.path, self._cached, data[end:], offset + end)

    def finish(self) -> None:
        """What was written is on the drive, and the file closed."""
        with self._disk_errors():
            self._behind.drain()
            os.fsync(self._cached)
        self.close()

    def close(self) -> None:
        """Idempotent. Nothing may be on its way to the drive."""
        for descriptor in (self._direct, self._cached):
            if descriptor >= 0:
                os.close(descriptor)
        self._cached = self._direct = -1

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WeightsFileError.of(error, str(self.path), "written") from error


class NewSafetensorsFile(NewFile):
    def _lay_out(self) -> tuple[Mapping[str, int], int]:
        ordered = {name: self.entries[name] for name in in_order_of_alignment(list(self.entries), self.entries)}
        header, offsets = encode_header(ordered, {"format": "pt"})
        write(self.path, self._cached, torch.frombuffer(bytearray(header), dtype=torch.uint8), 0)
        return offsets, len(header) + sum(entry.nbytes for entry in ordered.values())


class NewTorchFile(NewFile):
    """What ``torch.save`` writes of a state dict, its storages left out and filled in later."""

    def _lay_out(self) -> tuple[Mapping[str, int], int]:
        # memory that nobody touches takes no page
        hollow = {
            name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for name, entry in self.entries.items()
        }
        hollow |= {alias: hollow[name] for alias, name in self.aliases.items()}
        try:
            with torch.serialization.skip_data():
                torch.save(hollow, self.path)
        except RuntimeError as error:  # torch says so of a disk, and of a name that it cannot take
            reason = str(error).splitlines()[0]
            raise WeightsFileError(
                str(self.path), f"cannot be written by torch.save ({reason})", "free space there, or name another file"
            ) from error
        with FakeTensorMode():
            found = torch.load(self.path, weights_only=True)
        offsets = {name: int(tensor.untyped_storage()._checkpoint_offset) for name, tensor in found.items()}
        return offsets, os.fstat(self._cached).st_size

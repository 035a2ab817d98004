"""New files of weights: all of their space reserved at once, then filled in any order, a piece at a time."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from infinity.errors import WeightsFileError
from infinity.files.entry import Entry
from infinity.files.pieces import bytes_of
from infinity.files.safetensors_file import encode_header, in_order_of_alignment


class NewFile(ABC):
    """A file under construction. ``offsets``: where each tensor begins."""

    def __init__(self, path: Path, entries: Mapping[str, Entry], aliases: Mapping[str, str]) -> None:
        """``aliases``: other names of these tensors, for formats that know such. Raises WeightsFileError if there is no
        room for all of it."""
        self.path, self.entries, self.aliases = path, entries, aliases
        size_bytes = 0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            self.offsets, size_bytes = self._lay_out()
            if size_bytes:
                os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError as error:
            raise WeightsFileError.of(error, str(path), "written") from error

    @abstractmethod
    def _lay_out(self) -> tuple[Mapping[str, int], int]:
        """Write all but the tensors; where each begins, and the file's size."""

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Elements from ``first`` on of a tensor, row-major, in the dtype that it was announced in."""
        entry = self.entries[name]
        if values.dtype is not entry.dtype or first + values.numel() > entry.numel:
            raise AssertionError(f"{name} was announced as {entry}, and {values.numel()} {values.dtype} came")
        _write_all(self._descriptor, self.path, bytes_of(values), self.offsets[name] + first * values.element_size())

    def finish(self) -> None:
        """What was written is on the drive."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise WeightsFileError.of(error, str(self.path), "written") from error

    def close(self) -> None:
        os.close(self._descriptor)


class NewSafetensorsFile(NewFile):
    def _lay_out(self) -> tuple[Mapping[str, int], int]:
        ordered = {name: self.entries[name] for name in in_order_of_alignment(list(self.entries), self.entries)}
        header, offsets = encode_header(ordered, {"format": "pt"})
        _write_all(self._descriptor, self.path, memoryview(header), 0)
        return offsets, len(header) + sum(entry.nbytes for entry in ordered.values())


class NewTorchFile(NewFile):
    """What ``torch.save`` writes of a state dict, its storages left out and filled in later."""

    def _lay_out(self) -> tuple[Mapping[str, int], int]:
        # memory that nobody touches takes no page
        hollow = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in self.entries.items()}
        hollow |= {alias: hollow[name] for alias, name in self.aliases.items()}
        with torch.serialization.skip_data():
            torch.save(hollow, self.path)
        with FakeTensorMode():
            found = torch.load(self.path, weights_only=True)
        offsets = {name: int(tensor.untyped_storage()._checkpoint_offset) for name, tensor in found.items()}
        return offsets, os.fstat(self._descriptor).st_size


def _write_all(descriptor: int, path: Path, data: memoryview, offset: int) -> None:
    done = 0
    try:
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)
    except OSError as error:
        raise WeightsFileError.of(error, str(path), "written") from error

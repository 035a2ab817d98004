"""What every file of weights offers, whatever its format: entries by name, and any run of their elements."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from infinity.errors import WeightsFileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file, its elements in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def is_shell(dtype: torch.dtype) -> bool:
    """Whether torch has nothing but the name of it: values of fewer bits than a byte, which it cannot copy."""
    return re.fullmatch(r"torch\.u?int[1-7]", str(dtype)) is not None


class WeightsFile(ABC):
    """A file that is there to be read; it is open only while it is."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._identity = identity_of(path)

    @property
    @abstractmethod
    def entries(self) -> Mapping[str, Entry]:
        """Every tensor in the file, by name."""

    @abstractmethod
    def read(self, name: str, first: int, numel: int) -> torch.Tensor:
        """Elements [first, first + numel), 1-D, in the file's dtype: memory of their own."""

    def check_identity(self) -> None:
        """Raises WeightsFileError if another file stands there now than the one whose entries are known."""
        if identity_of(self.path) != self._identity:
            raise WeightsFileError(
                self.path, "has changed since its header was read", "leave it as it is until its weights are loaded"
            )


def identity_of(path: str) -> tuple[int, int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise WeightsFileError.of(error, path, "read") from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

"""Megatron's memory-mapped data sets: ``x.bin`` holds all samples behind each other, ``x.idx`` says where they lie.

The index is, little-endian: nine bytes of magic, the version 1 (uint64), the code of the dtype (uint8), the number of
samples and of document bounds (uint64 each); then each sample's elements (int32), its first byte (int64), and the
documents' bounds as numbers of samples (int64).
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from numpy.typing import DTypeLike, NDArray
from torch.utils.data import Dataset

from infinity.errors import ConfigError

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
HEADER: Final = struct.Struct("<9sQBQQ")
DTYPES: Final[dict[int, numpy.dtype[Any]]] = {
    1: numpy.dtype("uint8"),
    2: numpy.dtype("int8"),
    3: numpy.dtype("int16"),
    4: numpy.dtype("int32"),
    5: numpy.dtype("int64"),
    6: numpy.dtype("uint16"),
    7: numpy.dtype("uint32"),
    8: numpy.dtype("uint64"),
}
"""Each by its code."""


def index_file_path(prefix_path: str | os.PathLike[str]) -> str:
    """The file of the index."""
    return f"{os.fspath(prefix_path)}.idx"


def data_file_path(prefix_path: str | os.PathLike[str]) -> str:
    """The file of the samples."""
    return f"{os.fspath(prefix_path)}.bin"


class MMapIndexedDataset(Dataset[NDArray[Any]]):
    """Samples as numpy arrays that lie in the page cache, and cannot be written to.

    Args:
        path: without ``.idx`` and ``.bin``.
        skip_warmup: taken for the dialect's sake: nothing is read before it is used.

    Raises:
        ConfigError: the index is none, or of samples that the data file does not hold.
    """

    def __init__(self, path: str | os.PathLike[str], skip_warmup: bool = False) -> None:
        self._path = os.fspath(path)
        index = Path(index_file_path(path)).read_bytes()
        if len(index) < HEADER.size or HEADER.unpack_from(index)[:2] != (MAGIC, VERSION):
            raise ConfigError("path", index_file_path(path), "is no index of a memory-mapped data set, of version 1")
        _, _, code, num_samples, num_bounds = HEADER.unpack_from(index)
        size = HEADER.size + num_samples * 12 + num_bounds * 8
        if code not in DTYPES or len(index) < size:
            raise ConfigError("path", index_file_path(path), "is cut off, or of an unknown dtype: build it anew")
        self.dtype: numpy.dtype[Any] = DTYPES[code]
        self.sizes = numpy.frombuffer(index, "<i4", num_samples, HEADER.size)
        self._starts = numpy.frombuffer(index, "<i8", num_samples, HEADER.size + num_samples * 4)
        self._doc_idx = numpy.frombuffer(index, "<i8", num_bounds, HEADER.size + num_samples * 12)
        num_bytes = os.path.getsize(data_file_path(path))
        if num_samples and int((self._starts + self.sizes.astype("i8") * self.dtype.itemsize).max()) > num_bytes:
            raise ConfigError("path", data_file_path(path), "is shorter than its index says: build both anew")
        self._data = numpy.memmap(data_file_path(path), mode="r") if num_bytes else numpy.empty(0, "u1")

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, state: str) -> None:
        self.__init__(state)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, idx: int | slice) -> Any:
        """A sample; of a slice without a step the list of them."""
        if not isinstance(idx, slice):
            return self.get(idx)
        start, stop, step = idx.indices(len(self))
        if step != 1:
            raise ConfigError("idx", idx, "slices of an indexed data set have no step")
        return [self.get(number) for number in range(start, stop)]

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """A sample from element ``offset`` on, by default to its end."""
        length = int(self.sizes[idx]) - offset if length is None else length
        return numpy.frombuffer(self._data, self.dtype, length, int(self._starts[idx]) + offset * self.dtype.itemsize)

    def size(self, index: int) -> int:
        """Elements of a sample."""
        return int(self.sizes[index])

    @property
    def doc_idx(self) -> NDArray[Any]:
        """The number of samples before each document, and of all."""
        return self._doc_idx

    def get_doc_idx(self) -> NDArray[Any]:
        """``doc_idx``."""
        return self._doc_idx

    def set_doc_idx(self, doc_idx_: NDArray[Any]) -> None:
        """Let it say something else, in memory alone."""
        self._doc_idx = doc_idx_

    @property
    def supports_prefetch(self) -> bool:
        """False: the kernel reads ahead."""
        return False

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Whether both files are there."""
        return os.path.exists(index_file_path(path)) and os.path.exists(data_file_path(path))


class MMapIndexedDatasetBuilder:
    """Writes samples to ``out_file``, and with ``finalize`` their index."""

    def __init__(self, out_file: str | os.PathLike[str], dtype: DTypeLike | torch.dtype = numpy.int64) -> None:
        if isinstance(dtype, torch.dtype):
            dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._dtype = numpy.dtype(dtype)
        if self._dtype not in DTYPES.values():
            raise ConfigError("dtype", str(dtype), f"one of {', '.join(map(str, DTYPES.values()))}")
        self._file = open(out_file, "wb")  # noqa: SIM115 (finalize closes it)
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: torch.Tensor) -> None:
        """Append a sample."""
        self.add_item_numpy(tensor.numpy())

    def add_items(self, arr_list: Iterable[NDArray[Any]]) -> None:
        """Append several."""
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: NDArray[Any]) -> None:
        """Append a sample."""
        self._file.write(np_array.astype(self._dtype).tobytes())
        self._sizes.append(np_array.size)

    def end_document(self) -> None:
        """The samples since the last call are a document."""
        self._doc_idx.append(len(self._sizes))

    def merge_file_(self, another_file: str | os.PathLike[str]) -> None:
        """Append all samples and documents of another data set. Raises ConfigError if its dtype is another."""
        other = MMapIndexedDataset(another_file)
        if other.dtype != self._dtype:
            raise ConfigError("another_file", os.fspath(another_file), f"is of {other.dtype}, not of {self._dtype}")
        self._doc_idx.extend((len(self._sizes) + other.doc_idx)[1:].tolist())
        self._sizes.extend(other.sizes.tolist())
        with open(data_file_path(another_file), "rb") as file:
            shutil.copyfileobj(file, self._file)

    def finalize(self, index_file: str | os.PathLike[str]) -> None:
        """Close the data file and write its index."""
        self._file.close()
        ends = numpy.cumsum(numpy.array(self._sizes, "<i8") * self._dtype.itemsize)
        starts = numpy.concatenate([numpy.zeros(1, "<i8"), ends])[: len(self._sizes)]
        code = next(code for code, dtype in DTYPES.items() if dtype == self._dtype)
        header = HEADER.pack(MAGIC, VERSION, code, len(self._sizes), len(self._doc_idx))
        sizes, bounds = numpy.array(self._sizes, "<i4"), numpy.array(self._doc_idx, "<i8")
        Path(index_file).write_bytes(header + sizes.tobytes() + starts.astype("<i8").tobytes() + bounds.tobytes())

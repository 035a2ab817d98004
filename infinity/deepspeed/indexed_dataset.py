"""Datasets of tokens in Megatron's mapped files: ``NAME.bin`` has the items, ``NAME.idx`` where each of them lies.

An index holds a magic word, a version, the code of a dtype, two counts, and three arrays: how many numbers each item
has (int32), where it begins in bytes (int64), and with which item each document begins (int64).
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from infinity.deepspeed.asserted import asserted
from infinity.errors import ConfigError

MAGIC: Final = b"MMIDIDX\x00\x00"
HEADER: Final = struct.Struct("<9sQBQQ")
VERSION: Final = 1
dtypes: Final = {
    1: (np.uint8, torch.uint8),
    2: (np.int8, torch.int8),
    3: (np.int16, torch.int16),
    4: (np.int32, torch.int32),
    5: (np.int64, torch.int64),
    6: (np.uint16, None),
    7: (np.uint32, None),
    8: (np.uint64, None),
}
"""The dtypes that items may have, numpy's and torch's, by the code that an index has for them."""


def index_file_path(prefix_path: str) -> str:
    """The file of the index."""
    return f"{prefix_path}.idx"


def data_file_path(prefix_path: str) -> str:
    """The file of the items."""
    return f"{prefix_path}.bin"


class MMapIndexedDataset(Dataset[Any]):
    """Items of a file that is mapped, not read: arrays [tokens of the item] that cannot be written to.

    Args:
        path: of both files, without their endings.
        skip_warmup: taken for the dialect's sake: pages are read when they are looked at.

    Raises:
        ConfigError: the index is none, or the data is shorter than it says. OSError: a file cannot be read.
    """

    @asserted
    def __init__(self, path: str, skip_warmup: bool = False) -> None:
        self._path = str(path)
        index = Path(index_file_path(self._path))
        found = index.read_bytes()
        header = HEADER.unpack_from(found) if len(found) >= HEADER.size else (b"", 0, 0, 0, 0)
        magic, version, code, num_items, num_documents = header
        if magic != MAGIC or version != VERSION or code not in dtypes:
            raise ConfigError("path", str(index), "is no index of a mapped dataset: build one with this module")
        expected = HEADER.size + 12 * num_items + 8 * num_documents
        if len(found) != expected:
            raise ConfigError("path", str(index), f"has {len(found)} bytes instead of {expected}: build it anew")
        self._dtype = np.dtype(dtypes[code][0])
        self._sizes = np.frombuffer(found, np.int32, num_items, HEADER.size)
        self._starts = np.frombuffer(found, np.int64, num_items, HEADER.size + 4 * num_items)
        self._doc_idx = np.frombuffer(found, np.int64, num_documents, HEADER.size + 12 * num_items)
        data = Path(data_file_path(self._path))
        needed = int((self._starts + self._sizes.astype(np.int64) * self._dtype.itemsize).max()) if num_items else 0
        if data.stat().st_size < needed:
            raise ConfigError(
                "path", str(data), f"has {data.stat().st_size} bytes, and its index speaks of {needed}: build both anew"
            )
        self._bytes: NDArray[np.uint8] = np.memmap(data, mode="r") if needed else np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._path,)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, idx: int | slice) -> Any:
        if isinstance(idx, slice):
            numbers = range(*idx.indices(len(self)))
            if numbers.step != 1:
                raise ValueError("slices of an indexed dataset must be contiguous")
            return [self.get(number) for number in numbers]
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """``length`` numbers of an item from ``offset`` on, by default all."""
        size = int(self._sizes[idx])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"item {idx} has {size} numbers: there are no {length} from {offset} on")
        start = int(self._starts[idx]) + offset * self._dtype.itemsize
        return self._bytes[start : start + length * self._dtype.itemsize].view(np.ndarray).view(self._dtype)

    @property
    def dtype(self) -> Any:
        """The items' dtype, numpy's."""
        return self._dtype.type

    @property
    def sizes(self) -> NDArray[np.int32]:
        """How many numbers each item has."""
        return self._sizes

    def size(self, index: int) -> int:
        """How many numbers one item has."""
        return int(self._sizes[index])

    @property
    def doc_idx(self) -> NDArray[np.int64]:
        """The item with which each document begins, and the number of items."""
        return self._doc_idx

    def get_doc_idx(self) -> NDArray[np.int64]:
        """``doc_idx``."""
        return self._doc_idx

    def set_doc_idx(self, doc_idx_: NDArray[np.int64]) -> None:
        """Other documents from now on, in this object alone."""
        self._doc_idx = doc_idx_

    @property
    def supports_prefetch(self) -> bool:
        """Whether a loader is to name items before it asks for them."""
        return False

    @staticmethod
    def exists(path: str) -> bool:
        """Whether both files are there."""
        return Path(index_file_path(path)).exists() and Path(data_file_path(path)).exists()


class MMapIndexedDatasetBuilder:
    """Writes such files: items one after the other, then the index.

    Args:
        out_file: the file of the items; ``data_file_path`` names it.
        dtype: what the items are stored in, numpy's or torch's.
    """

    @asserted
    def __init__(self, out_file: str, dtype: Any = np.int64) -> None:
        self._code = next((code for code, known in dtypes.items() if dtype in known), 0)
        if not self._code:
            names = ", ".join(known[0].__name__ for known in dtypes.values())
            raise ConfigError("dtype", dtype, f"must be one of {names}")
        self._dtype = np.dtype(dtypes[self._code][0])
        self._file = Path(out_file).open("wb")  # noqa: SIM115 (finalize closes it)
        self._sizes: list[int] = []
        self._doc_idx = [0]

    def add_item(self, tensor: torch.Tensor) -> None:
        """Write one item, of any integer dtype that its values fit."""
        self.add_item_numpy(tensor.numpy())

    def add_items(self, arr_list: Iterable[NDArray[Any]]) -> None:
        """Write one item for each array."""
        for array in arr_list:
            self.add_item_numpy(array)

    def add_item_numpy(self, np_array: NDArray[Any]) -> None:
        """Write one item. Raises ValueError for values that its dtype does not hold."""
        stored = np_array.astype(self._dtype)
        if not np.array_equal(stored, np_array):
            raise ValueError(f"the item has values that {self._dtype} does not hold: give the builder a wider dtype")
        self._file.write(stored.tobytes())
        self._sizes.append(stored.size)

    def end_document(self) -> None:
        """The next item begins another document."""
        self._doc_idx.append(len(self._sizes))

    @asserted
    def merge_file_(self, another_file: str) -> None:
        """Append the items and documents of another dataset, named without ending."""
        other = MMapIndexedDataset(another_file)
        if other.dtype is not self._dtype.type:
            raise ConfigError(
                "another_file", another_file, f"holds {other.dtype.__name__}, and this one {self._dtype}: convert it"
            )
        self._doc_idx += [len(self._sizes) + int(first) for first in other.doc_idx[1:]]
        self._sizes += other.sizes.tolist()
        with Path(data_file_path(another_file)).open("rb") as data:
            shutil.copyfileobj(data, self._file)

    def finalize(self, index_file: str) -> None:
        """End the file of the items, and write that of the index."""
        self._file.close()
        sizes = np.array(self._sizes, dtype=np.int32)
        starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])[: len(sizes)] * self._dtype.itemsize
        header = HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(self._doc_idx))
        documents = np.array(self._doc_idx, dtype=np.int64)
        Path(index_file).write_bytes(header + sizes.tobytes() + starts.tobytes() + documents.tobytes())

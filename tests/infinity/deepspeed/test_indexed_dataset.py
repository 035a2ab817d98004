"""What mapped datasets do beside what the real ones do: they go to workers, and say what is wrong with their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from infinity.deepspeed.indexed_dataset import (
    MMapIndexedDataset,
    MMapIndexedDatasetBuilder,
    data_file_path,
    index_file_path,
)
from infinity.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "tokens")
    builder = MMapIndexedDatasetBuilder(data_file_path(made), dtype=np.uint16)
    for item in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        builder.add_item(torch.tensor(item))
    builder.end_document()
    builder.finalize(index_file_path(made))
    return made


def test_workers_read_it(path: str) -> None:
    loader = DataLoader(MMapIndexedDataset(path), num_workers=1, multiprocessing_context="spawn", collate_fn=list)
    assert [item.tolist() for (item,) in loader] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_items_are_read_only_and_bounded(path: str) -> None:
    dataset = MMapIndexedDataset(path)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 5
    with pytest.raises(IndexError, match="has 3 numbers"):
        dataset.get(1, offset=2, length=2)
    with pytest.raises(ValueError, match="contiguous"):
        dataset[::2]
    assert dataset[-1].tolist() == [7, 8, 9]


def test_an_empty_one_is_empty(tmp_path: Path) -> None:
    path = str(tmp_path / "empty")
    builder = MMapIndexedDatasetBuilder(data_file_path(path))
    builder.finalize(index_file_path(path))
    assert (len(MMapIndexedDataset(path)), MMapIndexedDataset(path)[:]) == (0, [])


def test_files_that_are_damaged_are_named(path: str) -> None:
    index, data = Path(index_file_path(path)), Path(data_file_path(path))
    whole = index.read_bytes()
    for spoiled, told in ((b"", "is no index"), (whole[:-1], "bytes instead of"), (b"X" + whole[1:], "is no index")):
        index.write_bytes(spoiled)
        with pytest.raises(ConfigError, match=told):
            MMapIndexedDataset(path)
    index.write_bytes(whole)
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(ConfigError, match="has 16 bytes, and its index speaks of 18"):
        MMapIndexedDataset(path)


def test_what_a_dtype_does_not_hold_is_refused(path: str, tmp_path: Path) -> None:
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "other.bin"), dtype=torch.uint8)
    with pytest.raises(ValueError, match="wider dtype"):
        builder.add_item(torch.tensor([256]))
    with pytest.raises(ConfigError, match="holds uint16"):
        builder.merge_file_(path)
    with pytest.raises(ConfigError, match="must be one of uint8"):
        MMapIndexedDatasetBuilder(str(tmp_path / "third.bin"), dtype=np.float64)
    builder.finalize(str(tmp_path / "other.idx"))

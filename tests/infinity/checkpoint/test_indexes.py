"""A checkpoint of many ranks: who reads which of its indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infinity.checkpoint import plain
from infinity.checkpoint.descriptors import Descriptors
from infinity.checkpoint.manifest import BUFFER, MANIFEST, SHARED_STATE, WEIGHT, Manifest, TensorEntry
from infinity.checkpoint.pieces import PieceWriter
from infinity.checkpoint.sealed import read_sealed, write_sealed
from infinity.checkpoint.stored import StoredCheckpoint
from infinity.checkpoint.writing import write_rank, write_state
from infinity.errors import CheckpointError
from tests.support.descriptors import open_fds

NUM_RANKS = 16
NUMEL = 64 * NUM_RANKS - 10
SMALL = 70
"""Elements of which the first two ranks have some."""


def entry(name: str, numel: int, kind: str = WEIGHT) -> TensorEntry:
    return TensorEntry(name=name, shape=(numel,), order=(0,), kinds={kind: "float32"})


def write(directory: Path, *, sharded: bool = True, lacks: int = -1) -> None:
    """Elements are 0, 1, 2, ... in each tensor. ``lacks``: the rank whose part is left out."""
    files: dict[str, Any] = {}
    for rank in range(NUM_RANKS):

        def put(writer: PieceWriter, rank: int = rank) -> None:
            for name, numel in (("large", NUMEL), ("small", SMALL)):
                first, stop = (64 * rank, min(64 * rank + 64, numel)) if sharded else (0, numel)
                if first < stop and rank != lacks and (sharded or rank == 0):
                    writer.add(name, WEIGHT, first, torch.arange(float(first), float(stop)))
            if rank == 0:
                writer.add_all("buffer", BUFFER, torch.arange(2 * float(NUM_RANKS)))

        files |= write_rank(directory, rank, put, plain.to_bytes({}))
    files |= write_state(directory / SHARED_STATE, plain.to_bytes({}))
    tensors = [entry("large", NUMEL), entry("small", SMALL), entry("buffer", 2 * NUM_RANKS, BUFFER)]
    manifest = Manifest(tag="x", written_by=None, world_size=NUM_RANKS, tensors=tensors, files=files)
    write_sealed(directory / MANIFEST, manifest.as_json(), indent=1)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the sealed files that were read."""
    names: list[str] = []

    def noted(path: Path) -> Any:
        names.append(path.name)
        return read_sealed(path)

    monkeypatch.setattr("infinity.checkpoint.stored.read_sealed", noted)
    return names


def index(*ranks: int) -> list[str]:
    return [MANIFEST, *(f"rank-{rank:05}.json" for rank in ranks)]


def test_one_of_many_readers_reads_the_indexes_of_who_had_its_part(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path)
    with StoredCheckpoint(tmp_path, reader=5, num_readers=NUM_RANKS) as checkpoint:
        checkpoint.look("large", WEIGHT, 5 * 64, 64)
        assert checkpoint.read("large", WEIGHT, 5 * 64, 64).tolist() == list(range(320, 384))
        assert read == index(5)
        assert checkpoint.read_whole("buffer", BUFFER).tolist() == list(range(2 * NUM_RANKS))
        assert read == index(5, 0)
        assert checkpoint.read("small", WEIGHT, 60, 10).tolist() == list(range(60, 70))
        assert read == index(5, 0, 1)
        assert checkpoint.read("large", WEIGHT, NUMEL - 10, 10).tolist() == list(range(NUMEL - 10, NUMEL))
        assert read == index(5, 0, 1, 15)


def test_what_was_not_sharded_is_rank_0s(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path, sharded=False)
    with StoredCheckpoint(tmp_path, reader=5, num_readers=NUM_RANKS) as checkpoint:
        assert checkpoint.read("large", WEIGHT, 5 * 64, 64).tolist() == list(range(320, 384))
    assert read == index(5, 0)


def test_who_reads_alone_reads_everything_at_once(tmp_path: Path, read: list[str]) -> None:
    write(tmp_path)
    with StoredCheckpoint(tmp_path) as checkpoint:
        assert read == index(*range(NUM_RANKS))
        assert checkpoint.read_whole("large", WEIGHT).tolist() == list(range(NUMEL))
        assert not list(checkpoint.verify())


def test_few_files_are_open_however_many_ranks_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(Descriptors.__init__, "__defaults__", (4,))
    before = open_fds()
    with StoredCheckpoint(tmp_path) as checkpoint:
        for _ in range(2):
            assert checkpoint.read_whole("large", WEIGHT).tolist() == list(range(NUMEL))
            assert len(open_fds()) == len(before) + 4
        assert not list(checkpoint.verify())
        assert len(open_fds()) == len(before) + 4
    assert open_fds() == before


@pytest.mark.parametrize("num_readers", [1, 3])
def test_elements_that_nobody_wrote_are_missed_before_they_are_read(num_readers: int, tmp_path: Path) -> None:
    write(tmp_path, lacks=7)
    with pytest.raises(CheckpointError, match=r"lacks elements of large \(weight\) from 448 on"):
        StoredCheckpoint(tmp_path, reader=1, num_readers=num_readers).look("large", WEIGHT, 64, 640)


def test_each_of_several_readers_looks_at_its_share_of_the_files(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "rank-00007.pieces").write_bytes(b"cut short")
    refused = 0
    for reader in range(3):
        try:
            StoredCheckpoint(tmp_path, reader=reader, num_readers=3).close()
        except CheckpointError as error:
            assert "has 9 bytes, written were" in str(error)
            refused += 1
    assert refused == 1

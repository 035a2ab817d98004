"""While an export takes its place no reader finds a mixture, and afterwards it is on the drive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from infinity.files.directory import INDEX_ENDING, SAFE_NAME
from infinity.files.entry import Entry
from infinity.files.export import Export
from infinity.files.replacing import Replacing

ENTRIES = {f"w{number}": Entry(dtype=torch.float32, shape=(256,)) for number in range(4)}


def export(directory: Path, value: float, max_shard_bytes: int) -> None:
    with Export(directory, ENTRIES, max_shard_bytes=max_shard_bytes) as export:
        for name in ENTRIES:
            export.write(name, 0, torch.full((256,), value))
        export.publish()


@pytest.mark.parametrize("before_bytes", [1024, 1 << 20])
def test_while_shards_take_their_names_no_reader_finds_a_model(
    before_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path, 1.0, before_bytes)
    index = SAFE_NAME + INDEX_ENDING
    put = Replacing.put

    def checked(self: Replacing, new: Path) -> None:
        assert not (tmp_path / index).exists()
        assert not (tmp_path / SAFE_NAME).exists()
        put(self, new)

    monkeypatch.setattr(Replacing, "put", checked)
    export(tmp_path, 2.0, 1024)
    assert (tmp_path / index).exists()


def test_the_names_of_a_model_s_files_are_on_the_drive_when_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[set[str]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        if os.fstat(fd).st_ino == tmp_path.stat().st_ino:
            synced.append({each.name for each in tmp_path.iterdir() if each.is_file()})

    monkeypatch.setattr(os, "fsync", noted)
    export(tmp_path, 1.0, 1 << 20)
    assert synced
    assert SAFE_NAME in synced[-1]

"""Pages of mapped files of weights leave the process, and nothing that they held is lost."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from infinity.weights.mapped_files import page_out_mapped_weights

NUMEL = 1 << 22


def resident_bytes(path: Path) -> int:
    """Of this process's mappings of the file."""
    text = Path("/proc/self/smaps").read_text(errors="replace")
    found = re.findall(rf"^[0-9a-f]+-[^\n]*{re.escape(str(path))}\n.*?^Rss:\s+(\d+) kB", text, re.MULTILINE | re.DOTALL)
    return sum(int(kilobytes) << 10 for kilobytes in found)


def test_what_was_read_through_a_mapping_leaves_the_process(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(NUMEL, dtype=torch.int32)}, path)
    with safe_open(path, framework="pt") as file:
        values: torch.Tensor = file.get_tensor("a")
    total = int(values.sum(dtype=torch.int64))
    if resident_bytes(path) < values.nbytes:
        pytest.skip("this version of safetensors maps nothing")
    page_out_mapped_weights()
    assert resident_bytes(path) < values.nbytes // 8
    assert int(values.sum(dtype=torch.int64)) == total, "read again from the file"


def test_only_files_of_weights_leave(tmp_path: Path) -> None:
    other, weights = tmp_path / "tokens.dat", tmp_path / "model.safetensors"
    for path in (other, weights):
        path.write_bytes(bytes(NUMEL))
    with (
        other.open("rb") as tokens,
        weights.open("rb") as model,
        mmap.mmap(tokens.fileno(), 0, access=mmap.ACCESS_READ) as above,  # the kernel maps downwards
        mmap.mmap(model.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert above[:] == mapped[:]
        page_out_mapped_weights()
        assert resident_bytes(other) == NUMEL
        assert resident_bytes(weights) < NUMEL // 8


def test_a_path_may_be_any_bytes(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\x85 model.bin")
    path.write_bytes(bytes(1 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == bytes(1 << 20)
        page_out_mapped_weights()
        assert mapped[:] == bytes(1 << 20)


def test_what_was_written_to_a_private_mapping_stays(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        mapped[5000] = 7
        page_out_mapped_weights()
        assert mapped[5000] == 7
    assert path.read_bytes() == bytes(1 << 20)


def test_where_the_system_takes_no_advice_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(NUMEL))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:] == bytes(NUMEL)
        page_out_mapped_weights()
        assert resident_bytes(path) == NUMEL

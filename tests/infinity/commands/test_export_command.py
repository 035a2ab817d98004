"""``infinity export``: what the checkpoint holds, in the dtype that is asked for; faults end with words and code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import infinity
from infinity.commands.cli import main
from infinity.errors import MismatchedWeightsError
from infinity.files import pieces
from tests.infinity.test_pretrained import TOKENS, config, net
from tests.infinity.test_weight_files import assert_same, read_back


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A directory with a checkpoint, and the most exact weights that the engine had."""
    directory = tmp_path_factory.mktemp("checkpoints")
    with infinity.initialize(model=net(), config=config(directory, "none", bf16=True))[0] as engine:
        engine.backward(engine(TOKENS))
        engine.step()
        engine.save_checkpoint(str(directory))
        expected = {**engine.full_state_dict(), **engine.full_master_state_dict()}
    return directory, expected


def _as(dtype: torch.dtype, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in expected.items()}


def test_every_format_and_dtype(
    saved: tuple[Path, dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, expected = saved
    monkeypatch.setattr(pieces, "PIECE_NUMEL", 100)
    assert main(["export", str(directory), str(tmp_path / "a"), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert_same(read_back(tmp_path / "a"), _as(torch.float32, expected), without={"head.weight"})
    assert report["bytes"] == sum(v.nbytes for v in read_back(tmp_path / "a").values())
    words = [str(directory / "global_step1"), str(tmp_path / "b"), "--dtype", "bf16", "--max-shard-size", "2KB"]
    assert main(["export", *words]) == 0
    assert_same(read_back(tmp_path / "b"), _as(torch.bfloat16, expected), without={"head.weight"})
    words = [str(directory), str(tmp_path / "c"), "--dtype", "fp16", "--format", "torch", "--tag", "global_step1"]
    assert main(["export", *words]) == 0
    whole = torch.load(tmp_path / "c" / "pytorch_model.bin", weights_only=True)
    assert_same(whole, _as(torch.float16, expected))
    net().load_state_dict(whole)
    model = net()
    infinity.load_pretrained(model, tmp_path / "b")
    assert torch.equal(model.conv.weight, expected["conv.weight"].bfloat16().float())
    with pytest.raises(MismatchedWeightsError):
        infinity.load_pretrained(torch.nn.Linear(2, 2), tmp_path / "b")


def test_faults_end_with_words(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = saved

    def ends(code: int, *words: object) -> str:
        assert main(["export", *map(str, words)]) == code
        return capsys.readouterr().err

    assert str(tmp_path / "none") in ends(1, tmp_path / "none", tmp_path / "out")
    assert "global_step7" in ends(1, directory, tmp_path / "out", "--tag", "global_step7")
    assert "--max-shard-size" in ends(2, directory, tmp_path / "out", "--max-shard-size", "big")
    (tmp_path / "file").write_text("in the way")
    assert str(tmp_path / "file") in ends(1, directory, tmp_path / "file")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (directory / "global_step1").iterdir():
        data = bytearray(path.read_bytes())
        if path.name.endswith(".pieces"):
            data[100] ^= 1
        (copy / path.name).write_bytes(data)
    (tmp_path / "theirs").mkdir()
    for out in ("theirs", "out", "deep/er/out"):
        assert "checksum" in ends(1, copy, tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "file", "theirs"], "nothing that it made stays"
    assert list((tmp_path / "theirs").iterdir()) == [], "nothing half-written stays"

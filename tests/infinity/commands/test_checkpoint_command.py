"""``infinity checkpoint``: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infinity.commands.cli import main
from tests.support.resumed import config_of, started, train


def test_info_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = started(config_of(precision="bf16"))
    train(engine, 1)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert main(["checkpoint", "info", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for words in ("first.weight", "96x16", "state.exp_avg float32", "frozen", "rank-00000.pieces", "global_steps 1"):
        assert words in text
    assert main(["checkpoint", "info", str(tmp_path / "global_step1"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    saved = tmp_path / "global_step1"
    sizes = {path.name: path.stat().st_size for path in saved.iterdir() if path.name != "manifest.json"}
    assert {name: file["bytes"] for name, file in told["files"].items()} == sizes
    assert told["bytes"] == sum(sizes.values())

    assert main(["checkpoint", "verify", str(tmp_path)]) == 0
    assert "whole" in capsys.readouterr().out
    pieces = saved / "rank-00000.pieces"
    data = bytearray(pieces.read_bytes())
    data[100] ^= 1
    pieces.write_bytes(data)
    assert main(["checkpoint", "verify", str(tmp_path), "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["path"] == str(pieces)
    pieces.unlink()
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "rank-00000.pieces" in capsys.readouterr().out
    assert main(["checkpoint", "info", str(tmp_path / "nothing")]) == 1
    assert "nothing: is not there; name a directory of checkpoints" in capsys.readouterr().err

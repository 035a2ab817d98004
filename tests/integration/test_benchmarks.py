"""What benchmarks share: a directory is there, or refused; figures that are kept name no place of this machine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.place import add_directory
from benchmarks.side import RESULTS, without_places


def test_a_directory_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_directory(parser, "--dir")
    assert parser.parse_args(["--dir", str(tmp_path)]).dir == tmp_path
    assert parser.parse_args([]).dir.is_dir()
    with pytest.raises(SystemExit):
        parser.parse_args(["--dir", str(tmp_path / "typo")])
    assert f"{tmp_path / 'typo'} is no directory: create it" in capsys.readouterr().err


def test_results_name_no_place_of_the_machine() -> None:
    found = {
        "path": "/scratch/of/somebody/infinity-bench-1", "file": "/home/me/venv/site-packages/deepspeed/__init__.py",
        "source": "/dev/nvme0n1", "mount_point": "/", "rows": [{"trace": "/scratch/gpt.json.gz"}], "words": "a/b of c",
    }  # fmt: skip
    assert without_places(found) == found | {
        "path": "infinity-bench-1", "file": "site-packages/deepspeed/__init__.py", "rows": [{"trace": "gpt.json.gz"}],
    }  # fmt: skip
    kept = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    assert {name: without_places(results) for name, results in kept.items()} == kept

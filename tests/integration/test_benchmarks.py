"""A benchmark's directory is there, or its command line is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.place import add_directory


def test_a_directory_that_is_not_there_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_directory(parser, "--dir")
    assert parser.parse_args(["--dir", str(tmp_path)]).dir == tmp_path
    assert parser.parse_args([]).dir.is_dir()
    with pytest.raises(SystemExit):
        parser.parse_args(["--dir", str(tmp_path / "typo")])
    assert f"{tmp_path / 'typo'} is no directory: create it" in capsys.readouterr().err

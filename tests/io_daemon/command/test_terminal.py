"""Reports where there is no terminal as one would expect it: without a width, or without standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from io_daemon.command.console import WIDTH_MIN, open_console

BENCH = [sys.executable, "-m", "io_daemon", "bench", "io", "--size", "64M", "--quiet"]


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("5", 80), ("20", WIDTH_MIN), ("133", 133)])
def test_a_width_that_shows_nothing_is_none(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert open_console().width == width


def test_a_report_is_printed_where_no_column_is(tmp_path: Path) -> None:
    words = [*BENCH, "--runtime", "0.1", "--ramp-time", "0", str(tmp_path)]
    ended = subprocess.run(words, env={**os.environ, "COLUMNS": "0"}, capture_output=True, text=True, check=True)
    assert "MB/s" in ended.stdout or "GB/s" in ended.stdout


def test_nobody_can_be_asked_where_standard_input_is_closed(tmp_path: Path) -> None:
    words = [*BENCH, "--write-limit", "1M", str(tmp_path)]
    ended = subprocess.run(["bash", "-c", 'exec "$@" <&-', "-", *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "--write-limit" in ended.stderr

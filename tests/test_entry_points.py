"""The installed commands: Ctrl-C ends them quietly from their first line on."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.signals import heed_signals

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
INTERRUPTED = """
import os, signal
class Meta(type):
    def __set_name__(self, owner, name):  # where an exception would come out as a RuntimeError
        os.kill(os.getpid(), signal.SIGINT)
class Inner(metaclass=Meta): pass
class Outer: inner = Inner
"""


@pytest.mark.parametrize(
    ("script", "words", "module"),
    [
        ("io-daemon", ["status"], "argparse"),
        ("io-daemon", ["status"], "pydantic"),
        ("io-daemon", ["bench", "--help"], "rich"),
        ("infinity", ["--help"], "argparse"),
        ("infinity", ["trace", "--config", "none", "--model-params", "1e6"], "torch"),
    ],
)
def test_an_interrupted_import_ends_quietly(script: str, words: list[str], module: str, tmp_path: Path) -> None:
    """A module of that name, found before the real one, sends the signal to itself."""
    (tmp_path / f"{module}.py").write_text(INTERRUPTED)
    home, function = SCRIPTS[script].split(":")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {home} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=heed_signals,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")

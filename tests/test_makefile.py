"""``make build`` installs again when a Python module came, moved or went, and not when one was edited.

An editable install keeps a list of the modules that it found: after a move, imports failed and make had nothing to do.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The Makefile in a tree of two modules whose environment is there, and a pip that only counts."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("constraints/development.txt", "constraints/kvikio.txt", "packaging/system-packages.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("pyproject.toml", "CMakeLists.txt", "infinity/a.py", "io_daemon/b.py", "build/stamps/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    (tmp_path / "pip").write_text("#!/bin/sh\necho install >>installs\n")
    (tmp_path / "pip").chmod(0o755)
    return tmp_path


def _installs(tree: Path) -> int:
    """Of all runs of ``make build`` so far, after one more."""
    subprocess.run(["make", "build", "PIP=./pip"], cwd=tree, check=True, timeout=60, capture_output=True)
    return (tree / "installs").read_text().count("install")


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("change", "installs"),
    [
        (lambda tree: None, 1),
        (lambda tree: (tree / "infinity/a.py").write_text("edited = True\n"), 1),
        (lambda tree: (tree / "infinity/a.py").rename(tree / "infinity/c.py"), 2),
        (lambda tree: (tree / "io_daemon/b.py").unlink(), 2),
        (lambda tree: (tree / "io_daemon/room.py").touch(), 2),
    ],
    ids=["nothing", "edited", "moved", "gone", "new"],
)
def test_build_installs_again_when_modules_moved(tree: Path, change: Callable[[Path], object], installs: int) -> None:
    assert _installs(tree) == 1
    change(tree)
    assert _installs(tree) == installs
    assert _installs(tree) == installs

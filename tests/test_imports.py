"""Imports go one way: csrc ← io_daemon ← infinity ← benchmarks. The command line loads torch only when it needs it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("io_daemon", "infinity", "benchmarks", "tests")
"""Each may import itself and those before it."""
ENVIRONMENT_READERS = {Path("infinity/config/environment.py"), Path("io_daemon/config.py")}


def _sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_imports_a_later_one(room: str) -> None:
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources(room)
        for line, module in _imported(path)
        if module.split(".")[0] in later
    ]
    assert not wrong


def test_the_daemon_never_imports_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources("io_daemon")
        for line, module in _imported(path)
        if module.split(".")[0] == "torch"
    ]
    assert not wrong


def test_cpp_includes_nothing_of_torch_or_python_but_in_the_bindings() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "csrc").rglob("*.?pp"))
        for line in path.read_text().splitlines()
        if line.startswith("#include")
        and ("torch/" in line or (path.name != "bindings.cpp" and ("nanobind" in line or "Python.h" in line)))
    ]
    assert not wrong


def test_the_environment_is_read_in_two_places_only() -> None:
    readers = set()
    for path in _sources("infinity", "io_daemon"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.add(path.relative_to(ROOT))
    # the launcher hands its own environment on to torchrun
    assert readers <= ENVIRONMENT_READERS | {Path("infinity/cli.py")}


@pytest.mark.parametrize("module", ["infinity.cli", "infinity.config", "infinity.launch", "io_daemon.cli"])
def test_loading_the_command_line_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

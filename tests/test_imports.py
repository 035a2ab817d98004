"""Imports go one way: csrc ← io_daemon ← infinity ← benchmarks. The command line loads torch only when it needs it."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("io_daemon", "infinity", "benchmarks", "tests")
"""Each may import itself and those before it."""
LADDERS = {
    "io_daemon": (
        "_native errors",
        "shared",
        "config",
        "disk",
        "policy",
        "machine",
        "rank",
        "serve",
        "command",
        "bench",
        "__main__",
    ),
    "infinity": (
        "errors states",
        "files",
        "config",
        "observe",
        "plan",
        "tiers",
        "weights",
        "update",
        "checkpoint loader report",
        "engine",
        "zero utils checkpointing",
        "entry pretrained",
        "deepspeed",
        "as_deepspeed",
        "__init__",
        "commands",
        "__main__",
    ),
}
"""Rooms from the ground up: each imports itself and what stands below it."""
NO_CLOCK_NO_WORLD = {"os", "time", "asyncio", "socket", "threading", "subprocess", "select", "signal"}
ENVIRONMENT_READERS = {Path("infinity/config/environment.py"), Path("io_daemon/config.py")}


def _sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(), str(path))))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also those inside functions and under TYPE_CHECKING."""
    for node in _nodes(path):
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


def _floor(package: str, module: str) -> int:
    """Of the room in which ``module`` (dotted) stands."""
    parts = module.split(".")
    room = parts[1] if len(parts) > 1 else "__init__"
    return next(floor for floor, rooms in enumerate(LADDERS[package]) if room in rooms.split())


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _modules_imported(path: Path) -> Iterator[tuple[int, str]]:
    """As ``_imported``, but ``from package import module`` names the module, not the package."""
    for node in _nodes(path):
        if isinstance(node, ast.ImportFrom):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                path_of = ROOT / full.replace(".", "/")
                is_module = path_of.with_suffix(".py").exists() or (path_of / "__init__.py").exists()
                is_module |= name.name == "_native"
                yield node.lineno, full if is_module else str(node.module)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)


@pytest.mark.parametrize("package", LADDERS)
def test_rooms_stand_on_a_ladder(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources(package)
        for line, module in _modules_imported(path)
        if module.split(".")[0] == package and _floor(package, module) > _floor(package, _module_of(path))
    ]
    assert not wrong


def test_no_two_files_import_each_other() -> None:
    """Not even for type checkers: a circle of names is a circle of thoughts."""
    imports = {
        _module_of(path).removesuffix(".__init__"): {module for _, module in _modules_imported(path)}
        for path in _sources("io_daemon", "infinity")
    }
    settled: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"a circle: {' -> '.join((*trail[trail.index(module) :], module))}"
        if module not in settled:
            for imported in sorted(imports[module] & imports.keys()):
                visit(imported, (*trail, module))
            settled.add(module)

    for module in sorted(imports):
        visit(module, ())


def test_the_policy_knows_no_clock_and_no_world() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources("io_daemon/policy")
        for line, module in _imported(path)
        if module.split(".")[0] in NO_CLOCK_NO_WORLD
    ]
    assert not wrong


def test_training_never_imports_the_benchmark() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _sources("infinity")
        for line, module in _imported(path)
        if module.startswith("io_daemon.bench")
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
        for node in _nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                readers.add(path.relative_to(ROOT))
    # the launcher hands its own environment on to torchrun
    assert readers <= ENVIRONMENT_READERS | {Path("infinity/commands/running.py")}


@pytest.mark.parametrize("module", ["infinity.commands.cli", "infinity.config", "io_daemon.command.cli"])
def test_loading_the_command_line_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0

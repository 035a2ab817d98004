"""The harness itself: no file of a room is left out, every judge exists, and mutants are what they should be."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from tests.mutations.cpp_operators import cpp_mutants
from tests.mutations.defects import read_defects
from tests.mutations.mutant import read_equivalents
from tests.mutations.python_operators import python_mutants
from tests.mutations.rooms import ROOMS, ROOT

DIRECTORIES = {
    "policy": "io_daemon/policy",
    "csrc": "csrc",
    "update": "infinity/update",
    "weights": "infinity/weights",
}


@pytest.mark.parametrize("name", ROOMS)
def test_every_source_of_a_room_is_mutated_and_judged(name: str) -> None:
    room, directory = ROOMS[name], DIRECTORIES[name]
    tracked = subprocess.run(["git", "ls-files", directory], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {
        path
        for path in tracked.stdout.splitlines()
        if Path(path).suffix in (".py", ".cpp", ".hpp") and "/tests/" not in path and (ROOT / path).is_file()
    }
    assert sources
    assert sources <= set(room.paths())
    assert {path for path in room.paths() if not room.tests(path)} == set()
    assert {Path(path).name for path in room.paths()} >= set(room.nearest), "a judged file has gone or was renamed"


@pytest.mark.parametrize("name", ROOMS)
def test_every_judge_exists_and_none_is_named_twice(name: str) -> None:
    room = ROOMS[name]
    for path in room.paths():
        judges = room.tests(path)
        assert len(set(judges)) == len(judges), path
        assert [judge for judge in judges if not (ROOT / judge).is_file()] == []


def test_no_equivalent_mutant_has_gone() -> None:
    """What is listed is generated from the code of today; else the entry is to be removed, or looked at again."""
    listed = read_equivalents(Path(__file__).parent / "equivalent.toml")
    made = {
        (path, *mutant.diff(source))
        for room in ROOMS.values()
        for path in room.paths()
        for source in [(ROOT / path).read_bytes()]
        for mutant in (cpp_mutants(path, source) if room.compiled else python_mutants(path, source))
    }
    assert set(listed) - made == set()


SOURCE = '''
"""A docstring with 1 and not true."""
LIMIT: Final = 1 << 20
NAMES: Final = {"one": 1}


def work(items: list[int], first: int = 3) -> int:
    """Another."""
    if first is None:
        raise AssertionError(f"never: {1 + 1}")
    if not items and first >= 0:
        raise ValueError(f"nothing: {len(items) - 1}")
    self.last = items[-1]
    pairs = zip(items, items, strict=True)
    log.flush()
    return items[0] + (first if True else 2)


def __repr__(self) -> str:
    return "x" * 3
'''


def mutants_of(source: str) -> dict[str, list[str]]:
    """What is made of each line that is changed."""
    found: dict[str, list[str]] = {}
    for mutant in python_mutants("a.py", source.encode()):
        ast.parse(mutant.apply(source.encode()))
        before, after = mutant.diff(source.encode())
        found.setdefault(before, []).append(after)
    return found


def test_what_is_mutated_in_python_and_what_is_not() -> None:
    found = mutants_of(SOURCE)
    assert not any(
        "docstring" in line or "LIMIT" in line or "never" in line or "strict" in line or '"x"' in line for line in found
    )
    assert set(found['NAMES: Final = {"one": 1}']) == {'NAMES: Final = {"one": 2}', 'NAMES: Final = {"one": 0}'}
    assert found["if first is None:"] == ["if not (first is None):"], "of an invariant only the whole condition"
    assert set(found["if not items and first >= 0:"]) >= {
        "if not items or first >= 0:",
        "if not items and first > 0:",
        "if (items) and first >= 0:",
        "if not (not items and first >= 0):",
        "if not items and first >= 1:",
    }
    assert found['raise ValueError(f"nothing: {len(items) - 1}")'] == ["pass"]
    assert "pass" in found["self.last = items[-1]"]
    assert found["log.flush()"] == ["pass"]
    assert set(found["return items[0] + (first if True else 2)"]) >= {
        "return items[0] - (first if True else 2)",
        "return items[0] + (first if not (True) else 2)",
        "pass",
    }


CPP = """
constexpr std::size_t kBatchMax = 64;  // chosen
int width = kLinearBits + 1;
  if (left <= limit && !done) throw_errno(EIO, "a + b == 1");
  cells.push_back(cell);
  cells.reserve(num_cells);
  Cells(const Cells&) = delete;
#if 1 == 1 && \\
    !defined(OTHER)
"""


def test_what_is_mutated_in_cpp_and_what_is_not() -> None:
    found: dict[str, list[str]] = {}
    for mutant in cpp_mutants("a.cpp", CPP.encode()):
        before, after = mutant.diff(CPP.encode())
        found.setdefault(before, []).append(after)
    assert not any(
        "kBatchMax" in line or "#" in line or "OTHER" in line or "reserve" in line or "delete" in line for line in found
    )
    assert set(found["int width = kLinearBits + 1;"]) >= {
        "int width = kLinearBits - 1;",
        "int width = kLinearBits + 2;",
    }
    condition = 'if (left <= limit && !done) throw_errno(EIO, "a + b == 1");'
    assert all(after.endswith('throw_errno(EIO, "a + b == 1");') for after in found[condition])
    assert len(found[condition]) == 4
    assert found["cells.push_back(cell);"] == [";"]


def test_every_old_defect_can_be_written_back_and_its_tests_exist() -> None:
    for defect in read_defects():
        assert defect.tests
        for mutant in defect.mutants(ROOT):
            assert mutant.apply((ROOT / mutant.path).read_bytes()) != (ROOT / mutant.path).read_bytes()
        for test in defect.tests:
            path, _, name = test.partition("::")
            assert not name or f"def {name}(" in (ROOT / path).read_text(), test

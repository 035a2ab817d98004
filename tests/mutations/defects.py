"""Defects that there once were, written back into today's code: ``python -m tests.mutations.defects``

A test that was written when a defect was mended is of use as long as it fails where the defect is there again. Each
stands in ``defects.toml``: what it was, which text of today makes way for what, and the tests that have to fail then.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from tests.mutations.mutant import Mutant
from tests.mutations.rooms import ROOMS
from tests.mutations.slot_tree import SlotTree

DEFECTS: Final = Path(__file__).with_name("defects.toml")
CPU_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class Change:
    path: str
    now: str
    then: str


@dataclass(frozen=True)
class Defect:
    what: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]

    @property
    def compiled(self) -> bool:
        return any(change.path.startswith("csrc/") for change in self.changes)

    def mutants(self, tree: Path) -> list[Mutant]:
        """One for each file. Raises ValueError unless each change's text of today stands in its file, once."""
        sources = {change.path: (tree / change.path).read_text() for change in self.changes}
        texts = dict(sources)
        for change in self.changes:
            if (count := texts[change.path].count(change.now)) != 1:
                raise ValueError(f"{self.what}: {change.path} has {count} times {change.now!r}")
            texts[change.path] = texts[change.path].replace(change.now, change.then)
        return [Mutant(path, 0, len(sources[path].encode()), text, self.what) for path, text in texts.items()]


def read_defects(path: Path = DEFECTS) -> list[Defect]:
    return [
        Defect(entry["what"], tuple(Change(**change) for change in entry["change"]), tuple(entry["tests"]))
        for entry in tomllib.loads(path.read_text())["defect"]
    ]


def unseen(defects: Sequence[Defect], directory: Path, console: Console) -> list[str]:
    """Tests that pass although their defect is back. What compiles comes last: each build takes a while."""
    passing: list[str] = []
    for compiled in (False, True):
        of_kind = [defect for defect in defects if defect.compiled is compiled]
        if not of_kind:
            continue
        slot = SlotTree(directory / str(compiled), ROOMS["csrc" if compiled else "policy"])
        for defect in of_kind:
            for test in defect.tests:
                seen = slot.sees(defect.mutants(slot.tree), test, CPU_LIMIT_S)
                console.print(f"{'seen' if seen else 'NOT SEEN'}: {defect.what} ({test})", soft_wrap=True)
                passing += [] if seen else [test]
        slot.close()
    return passing


def main() -> int:
    """The command; 1 if a defect is seen by a test of its own no more."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="those of which it is said")
    options = parser.parse_args()
    console = Console()
    defects = [defect for defect in read_defects() if options.only in defect.what]
    with tempfile.TemporaryDirectory() as directory:
        passing = unseen(defects, Path(directory), console)
    tests = sum(len(defect.tests) for defect in defects)
    console.print(f"{len(defects)} defects written back, {tests} tests: {tests - len(passing)} fail, as they must")
    return 1 if passing else 0


if __name__ == "__main__":
    raise SystemExit(main())

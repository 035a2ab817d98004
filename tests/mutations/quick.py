"""Mutants of a Python room by the nearest files of tests, in forks of one process that has imported all of it already:
``python -m tests.mutations.quick --room weights=60 --seed 1``

A fork gives a function the mutated code, and runs the tests. What is no function's (a default, a class's own lines) is
unknown here, and a Python that a test starts by itself does not see the mutant: who is unknown or survives is put
before all judges by ``python -m tests.mutations --resume``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import resource
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console

from tests.mutations.__main__ import EQUIVALENTS, Outcome, draw, read_outcomes, report
from tests.mutations.mutant import Mutant, read_equivalents
from tests.mutations.rooms import ROOMS, ROOT, Room
from tests.mutations.worker import OPTIONS, settle_hypothesis, watched

CPU_LIMIT_S: Final = 100.0
"""Of judges without a mutation."""
SLOWER: Final = 4
"""How many times as long a mutant may take, and some seconds."""
SPARE_S: Final = 5.0
NOT_HERE: Final = 71
"""The exit code of a fork that cannot be given the mutant."""

FUNCTIONS: Final[dict[str, list[types.FunctionType]]] = {}
"""By the file that they stand in."""


FORKING: Final = threading.Lock()


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def preload(room: Room, judges: Sequence[str]) -> None:
    """Import what the room, its tests and all that they use have: of this tree, wherever it is installed."""
    os.environ["MUTATION_TREE"] = str(ROOT)
    importlib.import_module("tests.mutations.slot.sitecustomize")
    for name in (*room.warm, "tests.conftest", *map(module_of, (*room.paths(), *judges))):
        importlib.import_module(name)
    settle_hypothesis()
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType):
            FUNCTIONS.setdefault(each.__code__.co_filename, []).append(each)
    gc.freeze()


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """All functions' code below a module's or a class's; not what lies within a function, which comes with it."""
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            if each.co_flags & 0x2:  # CO_NEWLOCALS: a function's
                yield each
            else:
                yield from codes_of(each)


def outside_of_functions(code: types.CodeType) -> Any:
    """What of a module is no function's own, to be compared."""
    parts = tuple(
        ("function", each.co_qualname)
        if isinstance(each, types.CodeType) and each.co_flags & 0x2
        else outside_of_functions(each)
        if isinstance(each, types.CodeType)
        else repr(each)
        for each in code.co_consts
    )
    return code.co_code, code.co_names, parts


def apply(mutant: Mutant) -> None:
    """In this process, from now on. Raises LookupError for what is not the code of functions that are here."""
    path = ROOT / mutant.path
    source = path.read_bytes()
    before, after = (compile(text, str(path), "exec", dont_inherit=True) for text in (source, mutant.apply(source)))
    if outside_of_functions(before) != outside_of_functions(after):
        raise LookupError("no function's")
    changed = [pair for pair in zip(codes_of(before), codes_of(after), strict=True) if pair[0] != pair[1]]
    given = 0
    for function in FUNCTIONS.get(str(path), ()):
        for old, new in changed:
            if function.__code__ == old and len(old.co_freevars) == len(new.co_freevars):
                function.__code__ = new
                given += 1
                break
    if given < len(changed):
        raise LookupError("a function that is not here")


def run_forked(judges: Sequence[str], prepare: Callable[[], None], limit_s: float) -> tuple[int | None, float]:
    """The exit code of pytest, and its CPU time; None: it hung, or took too long."""
    with FORKING:  # no other thread holds a lock that the child would wait for
        log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed below
        pid = os.fork()
    with log:
        if pid == 0:
            code = 70
            try:
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 1))
                for fd in (1, 2):
                    os.dup2(log.fileno(), fd)
                prepare()
                code = int(pytest.main([*OPTIONS, *judges]))
            except LookupError:
                code = NOT_HERE
            except BaseException:  # noqa: BLE001 -- whatever it is, this fork ends here
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        return watched(pid)


class Quick:
    def __init__(self, name: str, num_mutants: int, seed: int, num_judges: int) -> None:
        self._name, self._room, self._num_judges = name, ROOMS[name], num_judges
        self.mutants = draw(self._room, ROOT, num_mutants, seed)
        self._equivalents = read_equivalents(EQUIVALENTS)
        self._limits_s: dict[tuple[str, ...], float] = {}

    def judges(self, mutant: Mutant) -> tuple[str, ...]:
        return tuple(self._room.tests(mutant.path)[: self._num_judges])

    def preload(self) -> None:
        preload(self._room, sorted({judge for mutant in self.mutants for judge in self.judges(mutant)}))

    def check(self, judges: tuple[str, ...]) -> None:
        """Raises SystemExit if the judges fail without a mutation. What they take is a measure of what mutants may."""
        code, cpu_s = run_forked(judges, lambda: None, CPU_LIMIT_S)
        if code != 0:
            raise SystemExit(f"{judges} fail without a mutation")
        self._limits_s[judges] = SLOWER * cpu_s + SPARE_S

    def test(self, mutant: Mutant) -> Outcome:
        source = (ROOT / mutant.path).read_bytes()
        before, after = mutant.diff(source)
        reason = self._equivalents.get((mutant.path, before, after), "")
        outcome = Outcome(
            self._name, mutant.path, mutant.line(source), mutant.what, before, after, "equivalent", reason
        )
        if reason:
            return outcome
        start = time.monotonic()
        judges = self.judges(mutant)
        code, _ = run_forked(judges, lambda: apply(mutant), self._limits_s[judges])
        if code in (3, 4, 5, 70):
            raise SystemExit(f"{judges} could not be run with {before!r} as {after!r}: {code}")
        result = {None: "timeout", 0: "survived", NOT_HERE: "unknown"}.get(code, "killed")
        return replace(
            outcome, result=result, reason=" ".join(judges) if code else "", seconds=round(time.monotonic() - start, 1)
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.quick", description=__doc__.partition("\n")[0])
    parser.add_argument("--room", required=True, metavar="NAME=N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--judges", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="what it says is known already stands")
    options = parser.parse_args()
    name, _, count = options.room.partition("=")
    quick = Quick(name, int(count), options.seed, options.judges)
    known = {}
    if options.json.is_file():
        known = read_outcomes(options.json, ("killed", "timeout", "survived", "equivalent"))
    quick.preload()
    outcomes: list[Outcome] = []

    def work(mutant: Mutant) -> None:
        before, after = mutant.diff((ROOT / mutant.path).read_bytes())
        outcome = known.get((name, mutant.path, before, after))
        if outcome is None:
            outcome = quick.test(mutant)
        outcomes.append(outcome)
        rest = [each for each in known.values() if each.key not in {done.key for done in outcomes}]
        with FORKING:
            options.json.write_text(json.dumps([asdict(each) for each in [*outcomes, *rest]], indent=1) + "\n")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(quick.check, sorted({quick.judges(mutant) for mutant in quick.mutants})))
        list(pool.map(work, quick.mutants))
    report(Console(), name, outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How many small changes to the code do its tests see? ``python -m tests.mutations --room policy --seed 1``

Mutants are drawn by the seed, evenly over the files of a room. Each is tested in a copy of the tree by the tests near
its file, up to the first failure; a run that takes too long counts as killed. Mutants that no test can tell from the
original are listed, with the reason, in ``equivalent.toml``, and are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.mutations.cpp_operators import cpp_mutants
from tests.mutations.mutant import Mutant, read_equivalents
from tests.mutations.python_operators import python_mutants
from tests.mutations.rooms import ROOMS, Room
from tests.mutations.slot_tree import ROOT, SlotTree

EQUIVALENTS: Final = Path(__file__).parent / "equivalent.toml"
SLOWEST: Final = 3.0
"""How much longer than without a mutation a run may take; beside that, the time it takes to be scheduled at all."""
SPARE_S: Final = 20.0


@dataclass(frozen=True)
class Outcome:
    room: str
    path: str
    line: int
    what: str
    before: str
    after: str
    result: str
    reason: str = ""


def draw(room: Room, num_mutants: int, seed: int) -> list[Mutant]:
    """Evenly over the files, no two of one place."""
    shuffler = random.Random(seed)
    piles: list[list[Mutant]] = []
    for path in room.paths:
        source = (ROOT / path).read_bytes()
        found = list(cpp_mutants(path, source) if room.compiled else python_mutants(path, source))
        shuffler.shuffle(found)
        piles.append(list({mutant.start: mutant for mutant in found}.values()))
    drawn: list[Mutant] = []
    while len(drawn) < num_mutants and any(piles):
        # a long file gets more, but not all
        (pile,) = shuffler.choices(piles, weights=[len(pile) ** 0.5 for pile in piles])
        drawn.append(pile.pop())
    return drawn


@dataclass(frozen=True)
class Plan:
    num_mutants: int
    num_jobs: int
    minutes: float
    json_path: Path | None
    earlier: Sequence[Outcome]
    """Of the rooms before."""


def write_outcomes(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """After each mutant, so that a run that is cut off has told what it knows."""
    if path is not None:
        path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


class Campaign:
    """All mutants of one room, over some slots."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._room, self._seed = name, ROOMS[name], seed
        self._equivalents = read_equivalents(EQUIVALENTS)
        self._seconds: dict[str, float] = {}

    def run(self, plan: Plan, directory: Path, progress: Progress) -> list[Outcome]:
        mutants = draw(self._room, plan.num_mutants, self._seed)
        task = progress.add_task(f"{self._name}: preparing", total=len(mutants))
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(plan.num_jobs) as pool:
            slots = list(
                pool.map(lambda i: SlotTree(directory / f"{self._name}-{i}", self._room), range(plan.num_jobs))
            )
            self._measure(mutants, pool, slots)
            progress.update(task, description=self._name)
            deadline_s = time.monotonic() + 60 * plan.minutes
            waiting = iter(mutants)  # whoever is free takes the next

            def work(slot: SlotTree) -> None:
                for mutant in waiting:
                    if time.monotonic() > deadline_s:
                        return
                    outcomes.append(self._test(mutant, slot))
                    progress.advance(task)
                    write_outcomes(plan.json_path, [*plan.earlier, *outcomes])

            list(pool.map(work, slots))
            for slot in slots:
                slot.close()
        return outcomes

    def _measure(self, mutants: Sequence[Mutant], pool: ThreadPoolExecutor, slots: Sequence[SlotTree]) -> None:
        """How long each file of tests takes without a mutation; they have to pass."""
        files = sorted({test for mutant in mutants for test in self._room.tests[mutant.path]})

        def measure(number: int) -> None:
            for test in files[number :: len(slots)]:
                code, self._seconds[test] = slots[number].run([test], 600.0)
                if code != 0:
                    raise SystemExit(f"{slots[number].log()}\n{test} fails without a mutation")

        list(pool.map(measure, range(len(slots))))

    def _test(self, mutant: Mutant, slot: SlotTree) -> Outcome:
        source = (slot.tree / mutant.path).read_bytes()
        before, after = mutant.diff(source)
        reason = self._equivalents.get((mutant.path, before, after), "")
        timeout_s = SPARE_S + SLOWEST * sum(self._seconds[test] for test in self._room.tests[mutant.path])
        result = "equivalent" if reason else slot.test(mutant, source, timeout_s)
        return Outcome(self._name, mutant.path, mutant.line(source), mutant.what, before, after, result, reason)


def report(console: Console, name: str, outcomes: Sequence[Outcome]) -> float:
    """Print what a room's tests saw, and what not; the killed share."""
    counts = Counter(outcome.result for outcome in outcomes)
    num_killed = counts["killed"] + counts["timeout"]
    num_counted = num_killed + counts["survived"]
    share = num_killed / num_counted if num_counted else 1.0
    console.print(
        f"{name}: {num_killed} of {num_counted} killed ({share:.0%}), {counts['timeout']} of them by time; "
        f"{counts['equivalent']} equivalent, {counts['stillborn']} did not compile"
    )
    for outcome in outcomes:
        if outcome.result == "survived":
            console.print(f"  {outcome.path}:{outcome.line} ({outcome.what})", highlight=False)
            console.print(f"    - {outcome.before}", style="red", highlight=False, markup=False)
            console.print(f"    + {outcome.after}", style="green", highlight=False, markup=False)
    return share


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument("--room", choices=ROOMS, action="append", help="which to mutate; may be repeated (all)")
    parser.add_argument("--mutants", type=int, default=60, metavar="N", help="of each room (60)")
    parser.add_argument("--seed", type=int, default=1, help="which mutants (1)")
    parser.add_argument("--jobs", type=int, default=2, help="tested at once (2)")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="for each room; what has not begun then is left out"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where copies and builds stay for the next run")
    parser.add_argument("--share", type=float, default=0.9, help="killed share below which the exit code is 1 (0.9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every mutant and what became of it")
    options = parser.parse_args()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    shares: list[float] = []
    with contextlib.ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutations-")))
        for name in options.room or ROOMS:
            plan = Plan(options.mutants, options.jobs, options.minutes, options.json, outcomes)
            with Progress(*columns, console=console) as progress:
                found = Campaign(name, options.seed).run(plan, directory, progress)
            shares.append(report(Console(), name, found))
            outcomes = outcomes + found
    return 0 if min(shares) >= options.share else 1


if __name__ == "__main__":
    sys.exit(main())

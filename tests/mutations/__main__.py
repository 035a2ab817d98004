"""How many small changes to the code do its tests see? ``python -m tests.mutations --room policy --seed 1``

Mutants are drawn by the seed, evenly over the files of a room. Each is tested in a copy of the tree by the tests near
its file, up to the first failure; a run that takes too long counts as killed. Mutants that no test can tell from the
original are listed, with the reason, in ``equivalent.toml``, and are not counted. With ``--resume`` what an earlier run
of the same seed has killed is not tested again, only what survived or is new; with ``--first`` what survived stands,
too, so that a long run can be made in parts and its share is that of first verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.mutations.cpp_operators import cpp_mutants
from tests.mutations.mutant import Mutant, read_equivalents
from tests.mutations.python_operators import python_mutants
from tests.mutations.rooms import ROOMS, Room
from tests.mutations.slot_tree import SlotTree

EQUIVALENTS: Final = Path(__file__).parent / "equivalent.toml"
KILLED: Final = ("killed", "timeout")


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
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.room, self.path, self.before, self.after


def draw(room: Room, tree: Path, num_mutants: int, seed: int) -> list[Mutant]:
    """Of the sources in ``tree``: evenly over the files, no two of one place; a long file gets more, but not all.

    A mutant's place in the order depends on the seed and on its own line, so that most of those drawn stay the same
    when the code is changed elsewhere."""
    ranked: list[tuple[float, Mutant]] = []
    for path in room.paths(tree):
        source = (tree / path).read_bytes()
        made = cpp_mutants(path, source) if room.compiled else python_mutants(path, source)
        by_chance = sorted(made, key=lambda mutant: _chance(seed, path, *mutant.diff(source)))
        pile = list({mutant.start: mutant for mutant in reversed(by_chance)}.values())[::-1]
        offset = _chance(seed, path)
        ranked += [((number + offset) / len(pile) ** 0.5, mutant) for number, mutant in enumerate(pile)]
    ranked.sort(key=lambda entry: entry[0])
    return [mutant for _, mutant in ranked[:num_mutants]]


def _chance(seed: int, *words: str) -> float:
    """From 0 to 1."""
    digest = hashlib.blake2b("\0".join((str(seed), *words)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / (1 << 64)


@dataclass(frozen=True)
class Plan:
    num_mutants: int
    num_jobs: int
    minutes: float
    json_path: Path | None
    earlier: Sequence[Outcome]
    """Of the rooms before."""
    known: Mapping[tuple[str, str, str, str], Outcome]
    """What an earlier run has said, as far as that stands."""
    num_judges: int | None
    """How many of a file's tests judge, nearest first; None: all."""


def write_outcomes(path: Path | None, outcomes: Sequence[Outcome]) -> None:
    """After each mutant, so that a run that is cut off has told what it knows."""
    if path is not None:
        path.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")


def read_outcomes(path: Path, results: Sequence[str]) -> dict[tuple[str, str, str, str], Outcome]:
    """Those of an earlier run that have one of the results."""
    found = [Outcome(**outcome) for outcome in json.loads(path.read_text())]
    return {outcome.key: outcome for outcome in found if outcome.result in results}


class Campaign:
    """All mutants of one room, over some slots."""

    def __init__(self, name: str, seed: int) -> None:
        self._name, self._room, self._seed = name, ROOMS[name], seed
        self._equivalents = read_equivalents(EQUIVALENTS)

    def run(self, plan: Plan, directory: Path, progress: Progress) -> list[Outcome]:
        task = progress.add_task(f"{self._name}: preparing", total=plan.num_mutants)
        outcomes: list[Outcome] = []
        with ThreadPoolExecutor(plan.num_jobs) as pool:
            slots = list(
                pool.map(lambda i: SlotTree(directory / f"{self._name}-{i}", self._room), range(plan.num_jobs))
            )
            mutants = draw(self._room, slots[0].tree, plan.num_mutants, self._seed)
            progress.update(task, description=self._name, total=len(mutants))
            deadline_s = time.monotonic() + 60 * plan.minutes
            waiting = iter(mutants)  # whoever is free takes the next

            def work(slot: SlotTree) -> None:
                for mutant in waiting:
                    if time.monotonic() > deadline_s:
                        return
                    outcomes.append(self._test(mutant, slot, plan))
                    progress.advance(task)
                    write_outcomes(plan.json_path, [*plan.earlier, *outcomes])

            list(pool.map(work, slots))
            for slot in slots:
                slot.close()
        return outcomes

    def _before(self, mutant: Mutant, source: bytes) -> Outcome:
        """What is known of the mutant without a test."""
        before, after = mutant.diff(source)
        reason = self._equivalents.get((mutant.path, before, after), "")
        result = "equivalent" if reason else "unknown"
        return Outcome(self._name, mutant.path, mutant.line(source), mutant.what, before, after, result, reason)

    def _test(self, mutant: Mutant, slot: SlotTree, plan: Plan) -> Outcome:
        outcome = self._before(mutant, (slot.tree / mutant.path).read_bytes())
        if outcome.reason:
            return outcome
        if outcome.key in plan.known:
            return replace(plan.known[outcome.key], line=outcome.line)
        start = time.monotonic()
        result, reason = slot.test(mutant, self._room.tests(mutant.path)[: plan.num_judges])
        return replace(outcome, result=result, reason=reason, seconds=round(time.monotonic() - start, 1))


def report(console: Console, name: str, outcomes: Sequence[Outcome]) -> None:
    """Print what a room's tests saw, and what not."""
    counts = Counter(outcome.result for outcome in outcomes)
    num_killed = counts["killed"] + counts["timeout"]
    num_counted = num_killed + counts["survived"]
    share = num_killed / num_counted if num_counted else 1.0
    console.print(
        f"{name}: {num_killed} of {num_counted} killed ({share:.0%}), {counts['timeout']} of them by time; "
        f"{counts['equivalent']} equivalent, {counts['stillborn']} did not compile, {counts['unknown']} unknown"
    )
    for outcome in outcomes:
        if outcome.result == "equivalent":
            console.print(f"  {outcome.path}:{outcome.line} is equivalent: {outcome.reason}", highlight=False)
        if outcome.result == "survived":
            console.print(f"  {outcome.path}:{outcome.line} ({outcome.what})", highlight=False)
            console.print(f"    - {outcome.before}", style="red", highlight=False, markup=False)
            console.print(f"    + {outcome.after}", style="green", highlight=False, markup=False)


def report_all(console: Console, outcomes: Sequence[Outcome]) -> float:
    """Print all rooms together; the killed share."""
    num_killed = sum(outcome.result in KILLED for outcome in outcomes)
    num_counted = num_killed + sum(outcome.result == "survived" for outcome in outcomes)
    share = num_killed / num_counted if num_counted else 1.0
    console.print(f"all: {num_killed} of {num_counted} killed ({share:.0%}), of {len(outcomes)} drawn")
    return share


def _room(text: str) -> tuple[str, int | None]:
    name, _, count = text.partition("=")
    if name not in ROOMS:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ROOMS)}")
    return name, int(count) if count else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--room",
        type=_room,
        action="append",
        metavar="NAME[=N]",
        help=f"which to mutate, of {', '.join(ROOMS)}, and how many of it; may be repeated (all)",
    )
    parser.add_argument("--mutants", type=int, default=60, metavar="N", help="of each room (60)")
    parser.add_argument("--seed", type=int, default=1, help="which mutants (1)")
    parser.add_argument("--jobs", type=int, default=2, help="tested at once (2)")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="for each room; what has not begun then is left out"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where copies and builds stay for the next run")
    parser.add_argument("--share", type=float, default=0.9, help="killed share below which the exit code is 1 (0.9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every mutant and what became of it")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="JSON of an earlier run, whose killed stay killed")
    parser.add_argument("--first", action="store_true", help="of that run all stands, also what survived")
    parser.add_argument(
        "--judges", type=int, metavar="N", help="only the N files of tests nearest to each source (all)"
    )
    options = parser.parse_args()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes: list[Outcome] = []
    standing = (*KILLED, "survived", "stillborn", "equivalent") if options.first else KILLED
    known = read_outcomes(options.resume, standing) if options.resume is not None else {}
    with contextlib.ExitStack() as stack:
        directory = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mutations-")))
        for name, num_mutants in options.room or [(name, None) for name in ROOMS]:
            plan = Plan(
                num_mutants or options.mutants,
                options.jobs,
                options.minutes,
                options.json,
                outcomes,
                known,
                options.judges,
            )
            with Progress(*columns, console=console) as progress:
                found = Campaign(name, options.seed).run(plan, directory, progress)
            report(Console(), name, found)
            outcomes = outcomes + found
    return 0 if report_all(Console(), outcomes) >= options.share else 1


if __name__ == "__main__":
    sys.exit(main())

"""``python -m tests.checkpoints_full``: the matrix of who saves and who goes on, as a table.

``--kills N``, ``--late-kills N`` and ``--load-kills N`` end savers, trainings that save meanwhile, and loaders at
random moments and judge what they leave. ``--every N --first K`` judges a part of the matrix: every K makes the whole.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.checkpoint_cells import Side, Verdict, full_matrix, judge_all, selection
from tests.support.checkpoint_kills import Outcome, killed_late_saves, killed_loads, killed_saves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", choices=("full", "short", "none"), default="full", help="cells of the matrix")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th cell")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="beginning with this one")
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="of processes that save")
    parser.add_argument("--late-kills", type=int, default=0, metavar="N", help="of processes that save while training")
    parser.add_argument("--load-kills", type=int, default=0, metavar="N", help="of processes that load")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    console = Console(width=140)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="infinity-checkpoints-") as directory:
        kinds = (
            ("save", killed_saves, arguments.kills),
            ("late save", killed_late_saves, arguments.late_kills),
            ("load", killed_loads, arguments.load_kills),
        )
        for what, kill, num_kills in kinds:
            if num_kills:
                failed += _kills(console, what, kill, num_kills, arguments.seed, Path(directory))
        if arguments.select != "none":
            cells = full_matrix() if arguments.select == "full" else selection()
            failed += _matrix(console, judge_all(cells[arguments.first :: arguments.every], Path(directory)))
    raise SystemExit(1 if failed else 0)


def _matrix(console: Console, verdicts: Iterator[Verdict]) -> int:
    """Print the verdicts; how many have failed."""
    table = Table(title="Saved, loaded elsewhere, 10 steps on: what differs")
    for column in ("saved by", "gone on with by", "precision", "state", "losses", "largest error", "s", ""):
        table.add_column(column, justify="right" if column in ("largest error", "s") else "left")
    found = []
    for verdict in verdicts:
        found.append(verdict)
        print(f"\r{len(found)} pairs judged", end="", file=sys.stderr, flush=True)
        table.add_row(
            _side(verdict.before),
            _side(verdict.after),
            verdict.before.precision,
            f"{len(verdict.state_bits)} tensors",
            "0 bits" if verdict.losses_equal else "other sums",
            f"{verdict.error:.1e}",
            f"{verdict.seconds:.1f}",
            "ok" if verdict.passed else "FAILED",
        )
    console.print(table)
    failed = [verdict for verdict in found if not verdict.passed]
    same = [verdict for verdict in found if verdict.before.num_ranks == verdict.after.num_ranks]
    console.print(
        f"{len(found)} pairs, {len(failed)} failed; {len(same)} at the same number of ranks, of which "
        f"{sum(verdict.losses_equal for verdict in same)} with 0 differing bits"
    )
    return len(failed)


def _side(side: Side) -> str:
    return f"{side.num_ranks} x {side.tier}, stage {side.stage}, {side.budget_bytes >> 20} MiB"


def _kills(
    console: Console, what: str, kill: Callable[..., Iterator[Outcome]], num_kills: int, seed: int, directory: Path
) -> int:
    directory /= what
    directory.mkdir()
    outcomes = list(kill(directory, num_kills=num_kills, seed=seed))
    bad = [outcome for outcome in outcomes if outcome.problem]
    for outcome in bad:
        console.print(outcome)
    met = sum(outcome.aside for outcome in outcomes)
    console.print(
        f"{num_kills} kills of a {what}: {len(bad)} left the latest checkpoint other than whole; {met} met an "
        "unfinished one, which the next save removed"
    )
    return len(bad)


if __name__ == "__main__":
    main()

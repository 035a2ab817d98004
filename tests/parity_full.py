"""``python -m tests.parity_full``: judge the parity matrix and print the table of cells. ``make parity-full``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.support.device import NUM_RANKS_MAX
from tests.support.matrix import PAIRWISE_SEED, Cell, crossed, full_matrix, pairwise
from tests.support.parity import Verdict, in_order, launch


def selection(name: str) -> list[Cell]:
    """``full``; ``updates``: that with every time of the update and form of the masters beside each of its cells;
    ``pairwise``; or ``short``: one cell of each dtype and world size that streams everything, and one of each optimizer
    that the matrix has not."""
    match name:
        case "full":
            return [cell for cell in crossed() if cell.num_ranks <= NUM_RANKS_MAX]
        case "updates":
            return [cell for cell in crossed(together=("update", "masters")) if cell.num_ranks <= NUM_RANKS_MAX]
        case "pairwise":
            return pairwise(full_matrix(ranks=[ranks for ranks in (1, 2) if ranks <= NUM_RANKS_MAX]))
        case _:
            return [
                Cell(3, "nvme", "nvme", dtype, accumulation, False, False, num_ranks, "least", optimizer)
                for dtype, accumulation, num_ranks, optimizer in (
                    ("fp32", 4, 1, "AdamW"),
                    ("bf16", 1, 1, "RMSprop"),
                    ("fp32", 1, 2, "AdamW"),
                    ("fp16", 1, 2, "Lion"),
                )
                if num_ranks <= NUM_RANKS_MAX
            ]


def judged(
    cells: Sequence[Cell], *, num_steps: int, python_flags: Sequence[str] = (), jobs: int = 1
) -> Iterator[Verdict]:
    """Every cell's verdict as it comes, from ``jobs`` launches of processes per world size, which run side by side."""
    found: SimpleQueue[Verdict | None] = SimpleQueue()

    def run(part: Sequence[Cell], directory: Path) -> None:
        try:
            for verdict in launch(
                part, num_steps=num_steps, num_ranks=part[0].num_ranks, directory=directory, python_flags=python_flags
            ):
                found.put(verdict)
        finally:
            found.put(None)

    with tempfile.TemporaryDirectory(prefix="infinity-parity-") as name, ThreadPoolExecutor(jobs) as pool:
        parts = []
        for num_ranks in sorted({cell.num_ranks for cell in cells}, reverse=True):
            mine = in_order([cell for cell in cells if cell.num_ranks == num_ranks], num_steps)
            size = -(-len(mine) // jobs)
            parts += [mine[start : start + size] for start in range(0, len(mine), size)]
        running = [pool.submit(run, part, Path(name)) for part in parts]
        num_ended = 0
        while num_ended < len(running):
            verdict = found.get()
            if verdict is None:
                num_ended += 1
            else:
                yield verdict
        for each in running:
            each.result()


def new_table(num_steps: int) -> Table:
    table = Table(title=f"Parity over {num_steps} steps: differing bits against the same engine in memory / plain loop")
    factors = "stage, param, optimizer, dtype, acc, clip, ranks, budget, rule, thresholds, update, masters"
    for column in factors.split(", "):
        table.add_column(column)
    for column in ("losses", "weights", "plain losses", "plain weights", "s"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    return table


def add_row(table: Table, verdict: Verdict) -> None:
    cell = verdict.cell
    table.add_row(
        str(cell.stage),
        cell.param_tier,
        cell.optimizer_tier,
        cell.dtype,
        f"{cell.accumulation}, no_sync" if cell.no_sync else str(cell.accumulation),
        "on" if cell.clipping else "off",
        str(cell.num_ranks),
        "–" if cell.in_memory else cell.budget,
        cell.optimizer,
        cell.thresholds,
        cell.update,
        cell.masters,
        str(verdict.oracle_loss_bits),
        str(verdict.oracle_weight_bits),
        str(verdict.plain_loss_bits),
        str(verdict.plain_weight_bits),
        f"{verdict.seconds:.1f}",
        "[green]pass" if verdict.passed else "[red]FAIL",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", choices=("full", "updates", "pairwise", "short"), default="full")
    parser.add_argument("--num-steps", type=int, default=5, help="optimizer steps a cell; a loss scale skips more")
    parser.add_argument("--jobs", type=int, default=2, help="launches side by side")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th cell")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="beginning with this one")
    parser.add_argument("--json", action="store_true", help="one verdict a line instead of the table")
    arguments = parser.parse_args()
    python_flags = ["-O"] if sys.flags.optimize else []
    cells, failures, started = selection(arguments.cells)[arguments.first :: arguments.every], [], time.monotonic()
    table, console = new_table(arguments.num_steps), Console(width=150 if not sys.stdout.isatty() else None)
    with Live(table, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for verdict in judged(cells, num_steps=arguments.num_steps, python_flags=python_flags, jobs=arguments.jobs):
            if arguments.json:
                live.console.print_json(json.dumps(asdict(verdict), default=str), indent=None)
            add_row(table, verdict)
            if console.is_terminal:
                live.refresh()
            else:  # the table comes at the end; somebody may be watching a log
                print(f"{verdict.cell}: {'pass' if verdict.passed else 'FAIL'}", file=sys.stderr, flush=True)
            failures += [] if verdict.passed else [verdict]
    console.print()
    console.print(
        f"{len(cells) - len(failures)} of {len(cells)} cells pass ({arguments.cells}, pairwise seed {PAIRWISE_SEED}) "
        f"in {time.monotonic() - started:.0f} s"
    )
    for verdict in failures:
        console.print(f"[red]{verdict.cell}[/red]\n{verdict.failure or asdict(verdict)}", markup=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

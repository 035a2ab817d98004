"""``python -m tests.parity_full``: judge the parity matrix and print the table of cells. ``make parity-full``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tests.support.matrix import PAIRWISE_SEED, Cell, full_matrix, pairwise
from tests.support.parity import CLIPPED_ERROR_MAX, Verdict, launch


def selection(name: str) -> list[Cell]:
    """``full``, ``pairwise``, or ``short``: one cell of each dtype and world size that streams everything, and one of
    each optimizer that the matrix has not."""
    match name:
        case "full":
            return full_matrix()
        case "pairwise":
            return pairwise(full_matrix())
        case _:
            return [
                Cell("nvme", "nvme", dtype, accumulation, False, "least", num_ranks, optimizer)
                for dtype, accumulation, num_ranks, optimizer in (
                    ("fp32", 4, 1, "AdamW"),
                    ("bf16", 1, 1, "RMSprop"),
                    ("fp32", 1, 2, "AdamW"),
                    ("fp16", 1, 2, "Lion"),
                )
            ]


def judged(cells: Sequence[Cell], *, num_steps: int, python_flags: Sequence[str] = ()) -> Iterator[Verdict]:
    """Every cell's verdict, one launch of processes per world size."""
    with tempfile.TemporaryDirectory(prefix="infinity-parity-") as directory:
        for num_ranks in sorted({cell.num_ranks for cell in cells}):
            mine = [cell for cell in cells if cell.num_ranks == num_ranks]
            yield from launch(
                mine, num_steps=num_steps, num_ranks=num_ranks, directory=Path(directory), python_flags=python_flags
            )


def new_table(num_steps: int) -> Table:
    table = Table(title=f"Parity over {num_steps} steps: differing bits against the same engine in memory / plain loop")
    for column in ("param", "optimizer", "dtype", "acc", "clip", "budget", "ranks", "rule", "thresholds"):
        table.add_column(column)
    for column in ("losses", "weights", "plain losses", "plain weights", "plain error", "s"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    return table


def add_row(table: Table, verdict: Verdict) -> None:
    cell = verdict.cell
    plain = ["–" if bits is None else str(bits) for bits in (verdict.plain_loss_bits, verdict.plain_weight_bits)]
    table.add_row(
        cell.param_tier,
        cell.optimizer_tier,
        cell.dtype,
        str(cell.accumulation),
        "on" if cell.clipping else "off",
        "–" if cell.in_memory else cell.budget,
        str(cell.num_ranks),
        cell.optimizer,
        cell.thresholds,
        str(verdict.oracle_loss_bits),
        str(verdict.oracle_weight_bits),
        *plain,
        f"{verdict.plain_error:.1e}",
        f"{verdict.seconds:.1f}",
        "[green]pass" if verdict.passed else "[red]FAIL",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", choices=("full", "pairwise", "short"), default="full")
    parser.add_argument("--num-steps", type=int, default=10, help="optimizer steps a cell")
    parser.add_argument("--json", action="store_true", help="one verdict a line instead of the table")
    arguments = parser.parse_args()
    python_flags = ["-O"] if sys.flags.optimize else []
    cells, failures = selection(arguments.cells), []
    table, console = new_table(arguments.num_steps), Console(width=150 if not sys.stdout.isatty() else None)
    with Live(table, console=console, auto_refresh=False, vertical_overflow="visible") as live:
        for verdict in judged(cells, num_steps=arguments.num_steps, python_flags=python_flags):
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
        f"{len(cells) - len(failures)} of {len(cells)} cells pass ({arguments.cells}, pairwise seed {PAIRWISE_SEED}); "
        f"with clipping a relative error up to {CLIPPED_ERROR_MAX} against the plain loop is allowed, "
        "against the engine in memory never a bit"
    )
    for verdict in failures:
        console.print(f"[red]{verdict.cell}[/red]\n{verdict.failure or asdict(verdict)}", markup=True)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

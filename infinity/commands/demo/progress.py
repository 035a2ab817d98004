"""What the demo shows while it trains: a live table at a terminal, one line a step elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from infinity.commands.demo.training import StepRecord
from io_daemon.command.console import redraws

ROWS_SHOWN = 8
COLUMNS = ("step", "loss", "tokens/s", "resident MB", "on NVMe MB", "read GB/s", "write GB/s", "    stalled")


def cells(record: StepRecord) -> list[str]:
    return [
        str(record.index + 1),
        f"{record.loss:.3f}",
        f"{record.tokens_per_s:.0f}",
        f"{record.resident_bytes / 1e6:.0f}",
        f"{record.nvme_bytes / 1e6:.0f}",
        f"{record.read_gb_s:.2f}",
        f"{record.written_gb_s:.2f}",
        f"{record.stall_s:.2f} s {100 * record.stall_s / record.seconds:3.0f}%",
    ]


class TrainingProgress:
    """A context manager; call ``show`` once a step."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._records: list[StepRecord] = []
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("training", total=num_steps)
        self._live = Live(console=console, auto_refresh=False, transient=True) if redraws(console) else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            self._console.print("  ".join(COLUMNS), soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: StepRecord) -> None:
        if self._live is None:
            words = (cell.rjust(len(name)) for cell, name in zip(cells(record), COLUMNS, strict=True))
            self._console.print("  ".join(words), highlight=False, soft_wrap=True)
            return
        self._records = [*self._records, record][-ROWS_SHOWN:]
        self._bar.advance(self._task)
        table = Table.grid(padding=(1, 0))
        table.add_row(self._bar)
        table.add_row(self._rows())
        self._live.update(table, refresh=True)

    def _rows(self) -> Table:
        table = Table()
        for column in COLUMNS:
            table.add_column(column, justify="right")
        for record in self._records:
            table.add_row(*cells(record))
        return table

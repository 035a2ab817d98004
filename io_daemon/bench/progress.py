"""Live progress on a terminal: the phase, how much of it is done, and the rate of the moment. On standard error."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from io_daemon.command.console import open_console


class LiveProgress:
    """An ``Observer``; a context manager."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._progress = Progress(
            TextColumn("{task.description:36}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[rate]:>24}"),
            TimeElapsedColumn(),
            console=open_console(stderr=True),
            transient=True,
            disable=not enabled,
            refresh_per_second=4,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, name: str, total: float) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total or None, rate="")

    def progress(self, done: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def rate(self, read_bw_bytes: float, write_bw_bytes: float) -> None:
        rates = [f"{name} {rate / 1e9:.2f}" for name, rate in (("R", read_bw_bytes), ("W", write_bw_bytes)) if rate]
        if self._task is not None and rates:
            self._progress.update(self._task, rate=f"{' '.join(rates)} GB/s")

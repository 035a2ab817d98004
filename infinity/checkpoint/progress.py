"""A progress bar with bytes and their rate, where somebody looks on."""

from __future__ import annotations

import random
import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bars


class Progress:
    """``shown``: whether this process may draw; it does so on a terminal only."""

    def __init__(self, what: str, total_bytes: int, *, shown: bool) -> None:
        self._bars = _made() if shown and sys.stderr.isatty() else None
        self._task = self._bars.add_task(what, total=total_bytes) if self._bars is not None else None

    def advance(self, num_bytes: int) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, num_bytes)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()


def _made() -> Bars:
    """Rich is not imported before: it draws from Python's generator then, whose numbers are the script's."""
    drawn = random.getstate()
    try:
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        from io_daemon.command.console import open_console
    finally:
        random.setstate(drawn)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Bars(*columns, console=open_console(stderr=True), transient=True)

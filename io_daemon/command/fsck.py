"""``io-daemon fsck``: what lies in swap directories, for people and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from io_daemon.command.units import binary_bytes_text
from io_daemon.disk.inspection import Condition, FoundFile, inspect
from io_daemon.machine.facts import as_text
from io_daemon.shared.metrics import Figures


class FileReport(Figures):
    """A file with a swap file's name. Job, rank and pid are its header's, and None without one."""

    path: str
    condition: Condition
    num_bytes: int
    job: str | None
    rank: int | None
    daemon_pid: int | None
    note: str


class FsckReport(Figures):
    files: tuple[FileReport, ...]

    @property
    def is_well(self) -> bool:
        """Whether no file is damaged. What a dead daemon left is none."""
        return all(file.condition is not Condition.DAMAGED for file in self.files)


def check(directories: Iterable[Path]) -> FsckReport:
    """Raises ConfigError if one of ``directories`` cannot be listed."""
    return FsckReport(files=tuple(_report(found) for directory in directories for found in inspect(directory)))


def _report(found: FoundFile) -> FileReport:
    header = found.header
    return FileReport(
        path=as_text(found.path),
        condition=found.condition,
        num_bytes=found.num_bytes,
        job=None if header is None else header.job,
        rank=None if header is None else header.rank,
        daemon_pid=None if header is None else header.owner.pid,
        note=found.note,
    )


def lines(report: FsckReport) -> Iterator[str]:
    """The report for people, with what to do about what it found."""
    for file in report.files:
        whose = "" if file.job is None else f", {file.job} rank {file.rank}, daemon {file.daemon_pid}"
        note = f": {file.note}" if file.note else ""
        yield f"{file.path}: {file.condition}{whose}, {binary_bytes_text(file.num_bytes)}{note}"
    conditions = {file.condition for file in report.files}
    if not conditions:
        yield "no swap files"
    if Condition.LEFT in conditions:
        left = {str(Path(file.path).parent) for file in report.files if file.condition is Condition.LEFT}
        words = " ".join(f"--swap-dir {shlex.quote(path)}" for path in sorted(left))
        yield f"`io-daemon gc {words}` removes what is left behind"
    if Condition.DAMAGED in conditions:
        yield "what is damaged no daemon removes: end the job that uses it, if any does, and remove the file by hand"

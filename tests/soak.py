"""Tenants that attach, stream and die at random for as long as is asked. ``python -m tests.soak --minutes 30 --seed 1``

One daemon of its own, and in each of some slots one life after the other (``tests/support/soak_rank.py``): killed with
SIGKILL wherever they are, detached, hung up, frozen, full of nonsense, or out of time. Every word that a life reads is
checked. Of the daemon are sampled: the memory that is its own (RSS without files and without what it shares with
ranks), all of its RSS, and its open descriptors; the last two while every slot is attached, so that they say what the
daemon keeps and not who happens to be there. At the end nobody is there, and nothing may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from io_daemon.shared.control import Status, StatusRequest
from io_daemon.shared.metrics import DaemonStatus
from tests.support.daemon import ServedDaemon, eventually
from tests.support.raw_rank import RawRank
from tests.support.soak_rank import Figure, Life, draw_life, live

TURN_S: Final = 0.1
SAMPLE_EVERY: Final = 5
"""Turns."""
FROZEN_S: Final = 2.0
LIFE_S_MAX: Final = 120.0
"""Longer than any life with all its deadlines: what is there then hangs."""
FLAT: Final = 0.02
"""By how much the last minute's median may differ from the second one's."""
MINUTES_TO_JUDGE: Final = 4
ALARMS: Final = ("Traceback", "failed to serve", "failed to answer", "never retrieved", "Exception ignored")
"""Words that a healthy daemon has no reason to log, whatever ranks do."""
NICENESS: Final = 10


@dataclass(frozen=True)
class Sample:
    at_s: float
    own_bytes: int
    rss_bytes: int
    num_fds: int
    all_attached: bool


@dataclass
class Slot:
    """Where one life follows the other."""

    figures: Any
    life: Life
    process: BaseProcess
    begun_s: float
    stopped: bool = False

    def turn(self, now_s: float) -> None:
        """End a life whose time has come, if that is not its own affair."""
        age_s = now_s - self.begun_s
        pid = self.process.pid
        if pid is None or self.process.exitcode is not None:
            return
        if age_s > LIFE_S_MAX:
            self.process.kill()
            return
        if self.life.ending == "kill" and age_s > self.life.lasts_s:
            self.process.kill()
        elif self.life.ending == "freeze" and age_s > self.life.lasts_s and not self.stopped:
            os.kill(pid, signal.SIGSTOP)
            self.stopped = True
        elif self.stopped and age_s > self.life.lasts_s + FROZEN_S:
            self.process.kill()


@dataclass
class Result:
    minutes: float
    seed: int
    tenants: int
    lives: dict[str, int] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    leases: int = 0
    bytes_verified: int = 0
    wrong_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    by_minute: list[dict[str, float]] = field(default_factory=list)
    flat: dict[str, float] = field(default_factory=dict)
    """By figure: the last minute's median over the second one's."""
    at_rest: dict[str, list[float]] = field(default_factory=dict)
    """Before the first life and after the last one."""
    left_over: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        found = [*self.failed, *(f"left over: {what}" for what in self.left_over)]
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} wrong bytes")
        found += [f"{name} not flat: {ratio:.3f}" for name, ratio in self.flat.items() if abs(ratio - 1) > FLAT]
        return found


class Soak:
    def __init__(self, daemon: ServedDaemon, num_tenants: int, seed: int) -> None:
        self.failed: list[str] = []
        self.lives: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self._daemon = daemon
        self._rng = random.Random(seed)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.soak_rank"])
        self._begun_s = time.monotonic()
        self._slots = [self._begin(self._context.RawArray("Q", len(Figure))) for _ in range(num_tenants)]

    def run(self, lasts_s: float) -> Iterator[float]:
        """For so long; yields the seconds so far, turn by turn."""
        turn = 0
        while (now_s := time.monotonic()) < self._begun_s + lasts_s:
            for index, slot in enumerate(self._slots):
                slot.turn(now_s)
                if slot.process.exitcode is not None:
                    self._bury(slot)
                    self._slots[index] = self._begin(slot.figures)
            if turn % SAMPLE_EVERY == 0:
                self.samples.append(self._sample())
            turn += 1
            yield now_s - self._begun_s
            time.sleep(TURN_S)

    def end(self) -> None:
        """Nobody comes any more; whoever is there still lives to its end."""
        while any(slot.process.exitcode is None for slot in self._slots):
            for slot in self._slots:
                slot.turn(time.monotonic())
            time.sleep(TURN_S)
        for slot in self._slots:
            self._bury(slot)

    def _begin(self, figures: Any) -> Slot:
        life = draw_life(sum(self.lives.values()), self._rng)
        self.lives[life.ending] += 1
        process = self._context.Process(target=live, args=(self._daemon.socket, life, figures))
        process.start()
        return Slot(figures, life, process, time.monotonic())

    def _bury(self, slot: Slot) -> None:
        expected = -signal.SIGKILL if slot.life.ending in ("kill", "freeze") else 0
        age_s = time.monotonic() - slot.begun_s
        if slot.process.exitcode != expected or age_s > LIFE_S_MAX:
            self.failed.append(f"{slot.life}: status {slot.process.exitcode} after {age_s:.1f} s")
        slot.process.close()
        slot.figures[Figure.ATTACHED] = 0

    def _sample(self) -> Sample:
        all_attached = all(slot.figures[Figure.ATTACHED] and not slot.stopped for slot in self._slots)
        return sample(self._daemon, time.monotonic() - self._begun_s, all_attached)

    def total(self, figure: Figure) -> int:
        return sum(int(slot.figures[figure]) for slot in self._slots)


def sample(daemon: ServedDaemon, at_s: float, all_attached: bool) -> Sample:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{daemon.pid}/status").read_text().splitlines())
    own_bytes, rss_bytes = (int(status[name].split()[0]) << 10 for name in ("RssAnon", "VmRSS"))
    return Sample(at_s, own_bytes, rss_bytes, len(os.listdir(f"/proc/{daemon.pid}/fd")), all_attached)


def by_minute(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """Medians of every minute in which all slots were attached at some time."""
    minutes: dict[int, list[Sample]] = {}
    for each in samples:
        minutes.setdefault(int(each.at_s // 60), []).append(each)
    medians: list[dict[str, float]] = []
    for minute, members in sorted(minutes.items()):
        attached = [each for each in members if each.all_attached]
        if attached:
            medians.append(
                {
                    "minute": minute + 1,
                    "own_mib": statistics.median(each.own_bytes for each in members) / 2**20,
                    "rss_mib": statistics.median(each.rss_bytes for each in attached) / 2**20,
                    "fds": statistics.median(each.num_fds for each in attached),
                    "samples": len(attached),
                }
            )
    return medians


def flatness(minutes: Sequence[dict[str, float]]) -> dict[str, float]:
    """The last whole minute over the second one, or the first after it that has samples; empty for a run too short to
    say."""
    if len(minutes) < MINUTES_TO_JUDGE:
        return {}
    second = next(each for each in minutes if each["minute"] >= 2)
    return {name: round(minutes[-1][name] / second[name], 4) for name in ("own_mib", "rss_mib", "fds")}


def status_of(daemon: ServedDaemon) -> DaemonStatus:
    rank = RawRank(daemon.socket)
    try:
        answer, _ = rank.hello().ask(StatusRequest())
        if not isinstance(answer, Status):
            raise AssertionError(f"{answer} is no status")
        return answer.daemon
    finally:
        rank.close()


def soak(
    result: Result,
    swap_dir: Path,
    *options: str,
    on_turn: Callable[[float, Soak], None] = lambda _at_s, _run: None,
) -> Result:
    """Run as ``result`` says, and fill it in. ``on_turn`` hears of the seconds so far."""
    with contextlib.closing(ServedDaemon([swap_dir], *options)) as daemon:
        before = sample(daemon, 0.0, all_attached=False)
        fds_before = daemon.fds()
        run = Soak(daemon, result.tenants, result.seed)
        for at_s in run.run(60 * result.minutes):
            on_turn(at_s, run)
        run.end()
        status = status_of(daemon)
        result.lives, result.failed = dict(run.lives), run.failed
        result.leases, result.bytes_verified, result.wrong_bytes = map(
            run.total, (Figure.LEASES, Figure.BYTES_VERIFIED, Figure.WRONG_BYTES)
        )
        result.bytes_read = sum(device.bytes_read for device in status.devices)
        result.bytes_written = sum(device.bytes_written for device in status.devices)
        result.by_minute = by_minute([each for each in run.samples if each.at_s < 60 * result.minutes])
        result.flat = flatness(result.by_minute)
        result.left_over = left_over(daemon, fds_before)
        after = sample(daemon, 0.0, all_attached=False)
        result.at_rest = {
            "own_mib": [before.own_bytes / 2**20, after.own_bytes / 2**20],
            "rss_mib": [before.rss_bytes / 2**20, after.rss_bytes / 2**20],
            "fds": [before.num_fds, after.num_fds],
        }
        if (code := daemon.terminate()) != 0:
            result.failed.append(f"the daemon ended with status {code}")
        if any(word in daemon.stderr() for word in ALARMS):
            result.failed.append(f"the daemon's log:\n{daemon.stderr()}")
    return result


def left_over(daemon: ServedDaemon, fds_before: list[str]) -> list[str]:
    """What the daemon still has of tenants when none is there, once it has had the time to let go of it."""

    def found() -> list[str]:
        extra = list((Counter(daemon.fds()) - Counter(fds_before)).elements())
        mapped = [f"{count} mappings of {what}" for what in ("infinity-",) if (count := daemon.mapped(what))]
        return daemon.files() + extra + mapped

    with contextlib.suppress(AssertionError):
        eventually(lambda: not found(), "everything is given back")
    return found()


def print_result(console: Console, result: Result) -> None:
    table = Table("minute", "own MiB", "RSS MiB", "fds", "samples")
    for each in result.by_minute:
        table.add_row(
            f"{each['minute']:g}",
            *(f"{each[name]:.1f}" for name in ("own_mib", "rss_mib", "fds")),
            f"{each['samples']:g}",
        )
    console.print(table)
    console.print(
        f"{sum(result.lives.values())} lives ({', '.join(f'{count} {end}' for end, count in result.lives.items())}), "
        f"{result.leases} leases, {result.bytes_verified / 1e9:.1f} GB verified, {result.wrong_bytes} bytes wrong, "
        f"{result.bytes_read / 1e9:.1f} GB read, {result.bytes_written / 1e9:.1f} GB written; last minute over second: "
        f"{result.flat or 'too short to say'}; at rest, before and after: {result.at_rest}"
    )
    for problem in result.problems():
        console.print(problem, style="red", markup=False)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="default: 30")
    parser.add_argument("--seed", type=int, default=1, help="of lives, sizes, orders and ends; default: 1")
    parser.add_argument("--tenants", type=int, default=6, help="at a time; default: 6")
    parser.add_argument("--swap-dir", default=tempfile.gettempdir(), help="default: the directory for temporary files")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    os.nice(NICENESS)
    result = Result(minutes=arguments.minutes, seed=arguments.seed, tenants=arguments.tenants)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(dir=arguments.swap_dir, prefix="soak-") as directory,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task("soak", total=60 * arguments.minutes)

        def on_turn(at_s: float, run: Soak) -> None:
            what = f"soak: {sum(run.lives.values())} lives, {len(run.failed)} failed, {run.total(Figure.LEASES)} leases"
            progress.update(task, completed=at_s, description=what)

        soak(result, Path(directory), on_turn=on_turn)
    problems = result.problems()
    if arguments.json:
        print(json.dumps({**asdict(result), "problems": problems}, indent=2))
    else:
        print_result(Console(), result)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

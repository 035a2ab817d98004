"""Finalists take a training step in turns: real daemons, and nothing left behind however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from io_daemon.__main__ import main
from io_daemon.bench import sweep
from io_daemon.bench.run import Silent, open_targets
from io_daemon.bench.steps.step_race import (
    STATE_BYTES_MIN,
    TURNS_MAX,
    TURNS_MIN,
    Runner,
    race_problem,
    run_race,
    runners_of,
)
from io_daemon.bench.sweep import (
    ROUND_S_MIN,
    ROUNDS_EXPECTED,
    SEARCH_WRITE_SHARE,
    SweepSettings,
    run_sweep,
    within_write_limit,
)
from io_daemon.bench.sweep_plan import Cell, SweepPlan
from io_daemon.errors import ConfigError, DeviceIOError
from io_daemon.rank.process import DaemonProcess
from tests.support.daemon import DEADLINE_S, eventually
from tests.support.signals import heed_signals
from tests.support.small_step import small_step

ROOT = Path(__file__).resolve().parents[3]
CELLS = (Cell("posix", 1 << 16, 4), Cell("posix", 1 << 17, 2), Cell("posix", 1 << 18, 1))


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """However full disk and memory are here."""
    monkeypatch.setattr("io_daemon.bench.steps.step_race.disk_room_bytes", lambda directories: 1 << 40)
    monkeypatch.setattr("io_daemon.bench.steps.step_race.arena_room_bytes", lambda: 1 << 40)
    monkeypatch.setattr("io_daemon.bench.target.FREE_SHARE_KEPT", 0.0)


def small_runners(cells: Sequence[Cell]) -> list[Runner]:
    return [Runner(cell, small_step()) for cell in cells]


def test_each_takes_as_many_steps_and_nothing_is_left(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    for directory in directories:
        directory.mkdir()
    race = run_race(small_runners(CELLS), directories, Silent())
    assert set(race.steps_s) == set(CELLS)
    (num_turns,) = {len(steps_s) for steps_s in race.steps_s.values()}
    assert TURNS_MIN <= num_turns <= TURNS_MAX
    assert all(step_s > 0 for steps_s in race.steps_s.values() for step_s in steps_s)
    assert race.written_bytes > 0
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_together_they_take_no_more_than_the_sweep_does() -> None:
    cells = [*CELLS, Cell("posix", 4 << 20, 64)]
    runners = runners_of(cells, num_directories=1, size_bytes=1 << 30, bw_bytes=1e10)
    assert [runner.cell for runner in runners] == cells
    sizes = {runner.trace.swap_bytes for runner in runners}
    assert len(sizes) == 1, "all replay the same state"
    assert 0.8 * (1 << 30) < sum(runner.trace.swap_bytes for runner in runners) < 1.1 * (1 << 30)


def test_a_slow_drive_replays_less() -> None:
    fast, slow = (
        runners_of(CELLS, num_directories=1, size_bytes=4 << 30, bw_bytes=bw_bytes)[0].trace.swap_bytes
        for bw_bytes in (1e10, 1e8)
    )
    assert slow < 1.3 * STATE_BYTES_MIN
    assert fast > 10 * slow


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("size_bytes", "write_limit_bytes", "words"),
    [(1 << 30, 1 << 40, None), (1 << 20, 1 << 40, "--size"), (1 << 30, 1 << 20, "--write-limit")],
)
def test_what_does_not_fit_is_said(size_bytes: int, write_limit_bytes: int, words: str | None, tmp_path: Path) -> None:
    problem = race_problem(small_runners(CELLS), [tmp_path], size_bytes=size_bytes, write_limit_bytes=write_limit_bytes)
    assert problem is None if words is None else words in str(problem)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io_daemon.bench.steps.step_race.disk_room_bytes", lambda directories: 0)
    problem = race_problem(small_runners(CELLS), [tmp_path], size_bytes=1 << 30, write_limit_bytes=1 << 40)
    assert "free space" in str(problem)


def quick_sweep(directory: Path, **settings: object) -> SweepSettings:
    values = {
        "directories": (directory,),
        "size": 64 << 20,
        "engines": ("posix",),
        "cell_s": 0.1,
        "ramp_time_s": 0.0,
        "confirm_s": 0.0,
        "remember": False,
        "write_limit_bytes": 1 << 40,
    }
    return SweepSettings(**{**values, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("exhaustive", [False, True])
@pytest.mark.parametrize("bw_bytes", [1e8, 3e9, 1.2e10, 2e10, 1e11])
def test_rounds_leave_of_the_write_limit_what_comes_after(bw_bytes: float, exhaustive: bool, tmp_path: Path) -> None:
    given = quick_sweep(
        tmp_path, size=1 << 30, cell_s=0.5, ramp_time_s=0.2, write_limit_bytes=100 << 30, exhaustive=exhaustive
    )
    found = within_write_limit(given, bw_bytes)
    round_bytes = (found.cell_s + found.ramp_time_s) * bw_bytes * (1 - given.rwmixread / 100)
    if exhaustive or bw_bytes == 1e8:
        assert (found.cell_s, found.ramp_time_s) == (given.cell_s, given.ramp_time_s)
    else:
        assert ROUNDS_EXPECTED * round_bytes + given.size <= SEARCH_WRITE_SHARE * given.write_limit_bytes * 1.001
    assert ROUND_S_MIN <= found.cell_s <= given.cell_s


@pytest.mark.usefixtures("roomy")
def test_the_search_stays_within_the_write_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell of a drive as fast as this writes whatever it may."""
    given = quick_sweep(tmp_path, exhaustive=True, write_limit_bytes=200 << 20)
    written_bytes = [given.size]

    def measure(settings: SweepSettings, cell: Cell, targets: object, write_limit_bytes: int) -> tuple[float, int]:
        written_bytes.append(min(30 << 20, write_limit_bytes))
        return 1e9, written_bytes[-1]

    monkeypatch.setattr("io_daemon.bench.sweep._measure", measure)
    result = run_sweep(given)
    assert SEARCH_WRITE_SHARE * given.write_limit_bytes < sum(written_bytes) <= given.write_limit_bytes
    assert sum(len(cell.rounds) for cell in result.cells) == len(written_bytes) - 1
    assert any("the search ended early" in warning for warning in result.warnings)


@pytest.mark.usefixtures("roomy")
def test_a_cell_that_the_write_limit_cuts_short_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = quick_sweep(tmp_path, write_limit_bytes=65 << 20)
    monkeypatch.setattr("io_daemon.bench.sweep._measure", lambda *_: (1e15, 2 << 20))
    with pytest.raises(ConfigError, match="too little for one cell"):
        run_sweep(given)
    assert list(tmp_path.iterdir()) == []


def three_measured(plan: SweepPlan) -> list[Cell]:
    """However wide the rounds' spread is here."""
    return [Cell(cell.engine, cell.bs, cell.iodepth) for cell in plan.cells()[:3]]


@pytest.mark.usefixtures("roomy")
def test_a_sweep_lets_its_finalists_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("io_daemon.bench.steps.step_race.STATE_BYTES_MIN", 1 << 20)
    monkeypatch.setattr(SweepPlan, "finalists", three_measured)
    result = run_sweep(quick_sweep(tmp_path))
    assert result.replay is not None
    assert len(result.replay.finalists) == 3
    settings = [(finalist.engine, finalist.bs, finalist.iodepth) for finalist in result.replay.finalists]
    assert (result.chosen.engine, result.chosen.bs, result.chosen.iodepth) in settings
    assert [finalist.step_s for finalist in result.replay.finalists] == sorted(
        finalist.step_s for finalist in result.replay.finalists
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("roomy")
def test_a_sweep_too_small_to_replay_chooses_by_bandwidth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SweepPlan, "finalists", three_measured)
    result = run_sweep(quick_sweep(tmp_path))
    assert result.replay is None
    assert any("--size" in warning for warning in result.warnings)


@pytest.mark.usefixtures("roomy")
def test_a_daemon_that_cannot_start_leaves_the_choice_to_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dies = (sys.executable, "-c", "import sys; sys.exit('no locked memory left')")
    monkeypatch.setattr("io_daemon.bench.sweep._measure", lambda *_: (1e9, 0))
    monkeypatch.setattr("io_daemon.bench.steps.step_race.DaemonProcess", partial(DaemonProcess, command=dies))
    monkeypatch.setattr("io_daemon.bench.steps.step_race.STATE_BYTES_MIN", 1 << 20)
    monkeypatch.setattr(SweepPlan, "finalists", three_measured)
    result = run_sweep(quick_sweep(tmp_path))
    assert result.replay is None
    assert any("no locked memory left" in warning for warning in result.warnings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("roomy")
def test_a_failing_drive_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*words: object) -> None:
        raise DeviceIOError(errno=5, path="p", offset=0, expected_bytes=1, actual_bytes=0, operation="read")

    monkeypatch.setattr("io_daemon.bench.sweep._measure", lambda *_: (1e9, 0))
    monkeypatch.setattr("io_daemon.bench.sweep.run_race", fails)
    monkeypatch.setattr("io_daemon.bench.steps.step_race.STATE_BYTES_MIN", 1 << 20)
    monkeypatch.setattr(SweepPlan, "finalists", three_measured)
    with pytest.raises(DeviceIOError):
        run_sweep(quick_sweep(tmp_path))
    assert list(tmp_path.iterdir()) == []


RACE_FOR_EVER = """
import sys
from pathlib import Path
from io_daemon.command.interrupt import interruptible
from io_daemon.bench import sweep
from io_daemon.bench.run import Silent, open_targets
from io_daemon.bench.steps import step_race
from tests.io_daemon.bench.test_step_race import CELLS, small_runners
step_race.TURNS_MAX = 10**9
step_race.TURNS_S = 10**9
with interruptible():
    step_race.run_race(small_runners(CELLS), [Path(sys.argv[1])], Silent())
"""


def start_long_race(directory: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """All its daemons serve when this returns; their process ids."""
    process = subprocess.Popen(
        [sys.executable, "-c", RACE_FOR_EVER, str(directory)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )
    num_files = len(CELLS)
    eventually(lambda: process.poll() is not None or len(list(directory.glob("*.swap"))) == num_files, "all race")
    return process, [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for_end(pids: Sequence[int]) -> None:
    for pid in pids:
        eventually(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "its daemon ends")  # type: ignore[misc]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    process, daemons = start_long_race(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert len(daemons) == len(CELLS)
    wait_for_end(daemons)
    assert list(tmp_path.iterdir()) == []


def test_after_a_kill_gc_leaves_nothing(tmp_path: Path) -> None:
    process, daemons = start_long_race(tmp_path)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    wait_for_end(daemons)
    assert main(["gc", "--swap-dir", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_unfit_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        race_problem(small_runners(CELLS), [tmp_path / "none"], size_bytes=1 << 30, write_limit_bytes=1 << 40)


@pytest.mark.parametrize("ramp_time_s", [0.0, 60.0])
def test_a_cell_that_is_cut_short_has_taken_the_whole_write_limit(ramp_time_s: float, tmp_path: Path) -> None:
    """So its score does not count, of 0 where it ends within the ramp: that is a drive's that gets no I/O done."""
    (cell, *_) = CELLS
    given = quick_sweep(tmp_path, cell_s=60.0, ramp_time_s=ramp_time_s, rwmixread=0)
    with open_targets(given.io_settings(cell, 60, verify=False)) as targets:
        _, written_bytes = sweep._measure(given, cell, targets, 127 << 20)
    assert written_bytes == 127 << 20

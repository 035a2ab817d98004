"""``bench sweep``: the engine, block size and depth with which a training step is the shortest here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from io_daemon._native import ENGINES, probe_engine
from io_daemon.bench.engines.factory import REACTOR_ENGINES
from io_daemon.bench.result import IoResult, SweepFinalist, SweepReplay, SweepResult
from io_daemon.bench.run import NothingMeasured, Observer, Silent, cache_warnings, open_bench, open_targets, run_io
from io_daemon.bench.settings import (
    TRAINING_READ_PERCENT,
    WRITE_LIMIT_BYTES,
    Directories,
    Each,
    IoSettings,
    check_limit,
)
from io_daemon.bench.steps.step_race import StepRace, race_problem, race_writes_at_most, run_race, runners_of
from io_daemon.bench.sweep_plan import BLOCK_SIZES, DEPTHS, Cell, SweepPlan
from io_daemon.bench.target import Target
from io_daemon.command.units import block_text
from io_daemon.config import EngineName
from io_daemon.errors import ConfigError, DaemonLostError
from io_daemon.machine.tuning import Tuning, remember

LAYOUT_BS: Final = 1 << 20
LAYOUT_DEPTH: Final = 32
SEARCH_WRITE_SHARE: Final = 0.5
"""The search takes this part of the write limit: the rest is for replaying a step and for confirming the choice."""
ROUNDS_EXPECTED: Final = 60
CELL_S_MIN: Final = 0.1
"""Nobody may ask for less."""
ROUND_S_MIN: Final = 0.01
"""To which rounds shrink by themselves: enough for a hundred blocks on a drive of 100 GB/s."""


class SweepSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    directories: Directories
    size: Annotated[int, Field(ge=64 << 20)] = 2 << 30
    """The size of the file in each directory; a rest below the largest block is left alone."""
    engines: Each[EngineName] = REACTOR_ENGINES
    rwmixread: Annotated[int, Field(ge=0, le=100)] = TRAINING_READ_PERCENT
    cell_s: Annotated[float, Field(ge=CELL_S_MIN, le=600)] = 0.4
    """The measured time of one round of one cell; less on a drive that would write too much meanwhile."""
    ramp_time_s: Annotated[float, Field(ge=0, le=60)] = 0.2
    confirm_s: Annotated[float, Field(ge=0, le=86400)] = 15.0
    """The measured time of the chosen setting at the end; 0: none."""
    exhaustive: bool = False
    """Measure every cell of the grid as often as finalists are: slow, and what the adaptive search is judged by."""
    remember: bool = True
    seed: Annotated[int, Field(ge=0, lt=1 << 47)] = 1
    write_limit_bytes: Annotated[int, Field(ge=0)] = WRITE_LIMIT_BYTES

    def io_settings(
        self, cell: Cell, runtime_s: float, *, verify: bool, write_limit_bytes: int | None = None
    ) -> IoSettings:
        """Settings of one round of one cell. ``write_limit_bytes``: what is left of the sweep's; None = all of it."""
        return IoSettings(
            directories=self.directories,
            rw="rw",
            rwmixread=self.rwmixread,
            bs=cell.bs,
            iodepth=cell.iodepth,
            runtime_s=runtime_s,
            ramp_time_s=self.ramp_time_s,
            size=self.size // BLOCK_SIZES[-1] * BLOCK_SIZES[-1],
            engine=cell.engine,  # type: ignore[arg-type]  # checked by pydantic
            verify=verify,
            seed=self.seed,
            write_limit_bytes=self.write_limit_bytes if write_limit_bytes is None else write_limit_bytes,
        )


def run_sweep(settings: SweepSettings, observer: Observer | None = None) -> SweepResult:
    """Raises ConfigError, SwapSpaceError, DeviceIOError, DaemonLostError; leaves no file behind."""
    observer = observer or Silent()
    engines = _engines_that_work(settings.engines)
    plan = SweepPlan(engines, BLOCK_SIZES, [depth for depth in DEPTHS if 2 * depth * BLOCK_SIZES[-1] <= settings.size])
    begin = time.perf_counter()
    left_bytes, warnings = _search(settings, plan, observer)
    race, race_bytes = _race(settings, plan, left_bytes, observer, warnings)
    chosen = plan.chosen(race.steps_s if race else {})
    seconds = time.perf_counter() - begin
    left_bytes -= race_bytes
    confirmation = _confirm(settings, chosen, left_bytes, observer, warnings)
    remembered_in = None
    if settings.remember and not (confirmation is not None and confirmation.has_bad_blocks):
        try:
            remembered_in = remember(settings.directories, _tuning(chosen))
        except OSError as error:
            warnings.append(f"the choice is not remembered: {error}; set INFINITY_STATE_DIR to a directory of yours")
    measured = plan.cells()
    return SweepResult(
        cells=measured,
        chosen=next(cell for cell in measured if (cell.engine, cell.bs, cell.iodepth) == chosen),
        seconds=seconds,
        num_grid_cells=plan.num_grid_cells,
        replay=_replay_of(race) if race else None,
        confirmation=confirmation,
        io_daemon=io_daemon_section(settings.directories, chosen),
        remembered_in=str(remembered_in) if remembered_in else None,
        warnings=warnings,
    )


def _search(settings: SweepSettings, plan: SweepPlan, observer: Observer) -> tuple[int, list[str]]:
    """Bytes that may be written still, and warnings."""
    layout = settings.io_settings(Cell(plan.engines[0], LAYOUT_BS, LAYOUT_DEPTH), settings.cell_s, verify=False)
    check_limit(layout)
    warnings = []
    with open_targets(layout) as targets:
        begin = time.perf_counter()
        with open_bench(layout, targets) as bench:
            bench.lay_out(observer)
        bw_bytes = layout.layout_bytes / (time.perf_counter() - begin)
        left_bytes = settings.write_limit_bytes - layout.layout_bytes
        for cell in plan.every_cell() if settings.exhaustive else iter(plan.next_cell, None):
            observer.phase(f"{cell.engine} bs {block_text(cell.bs)} iodepth {cell.iodepth}", 0)
            score, written_bytes = _measure(within_write_limit(settings, bw_bytes), cell, targets, left_bytes)
            bw_bytes = max(bw_bytes, score)
            left_bytes -= written_bytes
            if left_bytes > 0:  # else the limit has cut it short
                plan.record(cell, score)
            if left_bytes < (1 - SEARCH_WRITE_SHARE) * settings.write_limit_bytes:
                warnings.append("the search ended early, to stay below --write-limit")
                break
        warnings += cache_warnings(layout, targets)
    if not plan.cells():
        raise ConfigError(
            "write_limit",
            settings.write_limit_bytes,
            f"laying out the files, {layout.layout_bytes} bytes, leaves too little for one cell: lower --size, raise "
            "--write-limit, or say --yes",
        )
    return left_bytes, warnings


def within_write_limit(settings: SweepSettings, bw_bytes: float) -> SweepSettings:
    """With rounds as short as the search's share of the write limit asks for, on a drive that moves so many bytes a
    second; but a cell of the whole grid takes as long as it was given."""
    if settings.exhaustive:
        return settings
    round_bytes = (settings.cell_s + settings.ramp_time_s) * bw_bytes * (1 - settings.rwmixread / 100)
    layout_bytes = settings.size * len(settings.directories)
    search_bytes = max(0.0, SEARCH_WRITE_SHARE * settings.write_limit_bytes - layout_bytes)
    share = min(1.0, search_bytes / ROUNDS_EXPECTED / max(1.0, round_bytes))
    shorter = {"cell_s": max(ROUND_S_MIN, settings.cell_s * share), "ramp_time_s": settings.ramp_time_s * share}
    return settings.model_copy(update=shorter)


def _race(
    settings: SweepSettings, plan: SweepPlan, left_bytes: int, observer: Observer, warnings: list[str]
) -> tuple[StepRace | None, int]:
    """A training step with each finalist, and bytes written at most. None if there is but one, or, with a warning, if
    it cannot be."""
    finalists = plan.finalists()
    if len(finalists) == 1:
        return None, 0
    size_bytes = settings.size * len(settings.directories)
    runners = runners_of(
        finalists, num_directories=len(settings.directories), size_bytes=size_bytes, bw_bytes=plan.best_score
    )
    problem = race_problem(runners, settings.directories, size_bytes=size_bytes, write_limit_bytes=left_bytes)
    if problem is not None:
        warnings.append(f"no training step was replayed, so bandwidth alone has chosen: {problem}")
        return None, 0
    try:
        race = run_race(runners, settings.directories, observer)
    except DaemonLostError as error:  # all together take more locked memory or kernel requests than one in training
        warnings.append(f"no training step could be replayed, so bandwidth alone has chosen: {error}")
        return None, race_writes_at_most(runners)
    return race, race.written_bytes


def _replay_of(race: StepRace) -> SweepReplay:
    finalists = [
        SweepFinalist(
            engine=cell.engine, bs=cell.bs, iodepth=cell.iodepth, step_s=statistics.median(steps_s), steps_s=steps_s
        )
        for cell, steps_s in race.steps_s.items()
    ]
    finalists.sort(key=lambda finalist: finalist.step_s)
    return SweepReplay(trace=race.trace, state_bytes=race.state_bytes, seconds=race.seconds, finalists=finalists)


def _confirm(
    settings: SweepSettings, chosen: Cell, left_bytes: int, observer: Observer, warnings: list[str]
) -> IoResult | None:
    """None if it is not wanted, or, with a warning, if nothing may be written any more or nothing was measured."""
    if settings.confirm_s == 0:
        return None
    confirm = settings.io_settings(chosen, settings.confirm_s, verify=True, write_limit_bytes=max(0, left_bytes))
    if left_bytes <= confirm.layout_bytes:
        warnings.append("the choice was not confirmed: --write-limit leaves too little for it")
        return None
    try:
        return run_io(confirm, observer)
    except NothingMeasured as error:  # the search has found its choice all the same
        warnings.append(f"the choice was not confirmed: {error.remedy}")
        return None


def _tuning(chosen: Cell) -> Tuning:
    return Tuning.model_validate({"engine": chosen.engine, "block_bytes": chosen.bs, "queue_depth": chosen.iodepth})


def io_daemon_section(directories: Sequence[Path], chosen: Cell) -> dict[str, Any]:
    """The section as a job's config takes it."""
    return {
        "swap_dirs": [str(path) for path in directories],
        "engine": f"require:{chosen.engine}",
        "block_size": chosen.bs,
        "queue_depth": chosen.iodepth,
    }


def _engines_that_work(wanted: Sequence[str]) -> list[str]:
    problems = {name: probe_engine(name) if name in ENGINES else "not compiled in" for name in wanted}
    working = [name for name, problem in problems.items() if problem is None]
    if not working:
        raise ConfigError("engines", list(wanted), f"none of them works here: {problems}")
    return working


def _measure(
    settings: SweepSettings, cell: Cell, targets: Sequence[Target], write_limit_bytes: int
) -> tuple[float, int]:
    """Bytes a second, reads and writes together, and bytes written: the whole limit where that has cut it short."""
    cell_settings = settings.io_settings(cell, settings.cell_s, verify=False, write_limit_bytes=write_limit_bytes)
    with open_bench(cell_settings, targets) as bench:
        try:
            result = bench.measure(Silent())
            score = sum(way.bw_bytes for way in (result.read, result.write) if way is not None)
        except NothingMeasured:
            score = 0.0  # the drive does not get a single I/O done in a round: every other setting is better
        written = sum(job.engine.counters().write_bytes for job in bench.jobs)
    return score, write_limit_bytes if bench.has_spent else written

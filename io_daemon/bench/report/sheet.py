"""A report as sheets of text, the same ones for the terminal and for the page. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from io_daemon.bench.result import (
    CompareLine,
    CompareResult,
    Direction,
    IoResult,
    Report,
    StepResult,
    SweepCell,
    SweepFinalist,
    SweepReplay,
    SweepResult,
)
from io_daemon.command.units import (
    binary_bytes_text,
    block_text,
    count_text,
    decimal_bytes_text,
    latency_text,
    number_text,
    rate_text,
    seconds_text,
    share_text,
)
from io_daemon.config import BLOCK_BYTES, QUEUE_DEPTH
from io_daemon.policy.step_trace import world_text

BEST_CELLS_MAX: Final = 8
METRIC_NAMES: Final[dict[str, str]] = {
    "bw_bytes": "bw",
    "clat_p50_ns": "p50",
    "clat_p99_ns": "p99",
    "cpu_s_per_gb": "CPU/GB",
}


@dataclass(frozen=True)
class Sheet:
    """``headings`` empty: rows are a name and what it is. Otherwise columns after the first are figures."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marks: dict[int, Literal["good", "bad"]] = field(default_factory=dict)
    """Marks of rows, by index."""
    note: str = ""


def report_sheets(report: Report) -> list[Sheet]:
    """Sheets of the result; the machine's are ``machine_sheets``."""
    match report.result:
        case IoResult():
            return list(_io_sheets(report.result, ""))
        case SweepResult():
            return list(_sweep_sheets(report.result))
        case CompareResult():
            return [_compare_sheet(report.result)]
        case StepResult():
            return [_step_sheet(report.result)]


def report_warnings(report: Report) -> list[str]:
    """Warnings of the result and of what it is built on, each once."""
    warnings = list(report.result.warnings)
    if isinstance(report.result, SweepResult) and report.result.confirmation is not None:
        warnings += report.result.confirmation.warnings
    return list(dict.fromkeys(warnings))


def _io_sheets(result: IoResult, prefix: str) -> Iterator[Sheet]:
    ways = [(name, way) for name, way in (("read", result.read), ("write", result.write)) if way is not None]
    rates = [
        (name, rate_text(way.bw_bytes), count_text(way.iops), decimal_bytes_text(way.io_bytes)) for name, way in ways
    ]
    if len(ways) == 2:
        both = [way for _, way in ways]
        total_bw, total_iops = sum(way.bw_bytes for way in both), sum(way.iops for way in both)
        total_bytes = sum(way.io_bytes for way in both)
        rates.append(("both", rate_text(total_bw), count_text(total_iops), decimal_bytes_text(total_bytes)))
    way_of_access = "direct" if result.direct else "buffered"
    yield Sheet(
        f"{prefix}rates: {result.engine}, {way_of_access}, {seconds_text(result.measured_s)}",
        ("", "bw", "iops", "moved"),
        tuple(rates),
    )
    yield Sheet(
        f"{prefix}latency",
        ("", "mean", "p50", "p99", "p99.9", "max"),
        tuple(row for name, way in ways for row in _latency_rows(name, way)),
    )
    yield _summary_sheet(result, prefix)


def _latency_rows(name: str, way: Direction) -> Iterator[tuple[str, ...]]:
    for part, summary in (("slat", way.slat), ("clat", way.clat), ("lat", way.lat)):
        figures = (summary.mean_ns, summary.p50_ns, summary.p99_ns, summary.p999_ns, summary.max_ns)
        yield (f"{name} {part}", *map(latency_text, figures))


def _summary_sheet(result: IoResult, prefix: str) -> Sheet:
    steady, cpu, checked = result.steady, result.cpu, result.verification
    if steady.reached and steady.bw_bytes is not None and steady.begin_s is not None:
        since = f"from {seconds_text(steady.begin_s)} on" if steady.begin_s else "throughout"
        rows = [("steady", f"{rate_text(steady.bw_bytes)} {since}")]
    else:
        rows = [("steady", "not reached: measure longer (--runtime)")]
    if steady.burst_bw_bytes is not None:
        rows.append(("burst before", rate_text(steady.burst_bw_bytes)))
    cores = (cpu.user_s + cpu.system_s) / result.measured_s if result.measured_s else 0.0
    rows.append(("CPU", f"{cpu.s_per_gb:.3f} s/GB: {cores:.2f} cores, {_system_share(cpu.user_s, cpu.system_s)}"))
    if result.num_short_ios:
        rows.append(("short I/Os", count_text(result.num_short_ios)))
    marks: dict[int, Literal["good", "bad"]] = {} if steady.reached else {0: "bad"}
    if checked is None:
        rows.append(("verification", "switched off"))
    else:
        marks[len(rows)] = "bad" if checked.num_bad_blocks else "good"
        verdict = f"{count_text(checked.num_bad_blocks)} BAD of " if checked.num_bad_blocks else "all well of "
        rows.append(
            ("verification", f"{verdict}{count_text(checked.num_blocks)} blocks, {seconds_text(checked.seconds)}")
        )
        for place in checked.bad:
            marks[len(rows)] = "bad"
            rows.append(("", place))
    return Sheet(f"{prefix}over time", (), tuple(rows), marks)


def _system_share(user_s: float, system_s: float) -> str:
    total_s = user_s + system_s
    return f"{share_text(system_s / total_s)} of it in the kernel" if total_s else "too little to measure"


def _sweep_sheets(result: SweepResult) -> Iterator[Sheet]:
    best = max(result.cells, key=lambda cell: cell.score_bw_bytes).score_bw_bytes
    shown = [cell for rank, cell in enumerate(result.cells) if rank < BEST_CELLS_MAX or cell == result.chosen]
    yield Sheet(
        f"best of {len(result.cells)} settings measured ({result.num_grid_cells} in the grid) "
        f"in {seconds_text(result.seconds)}",
        ("engine", "bs", "iodepth", "bw", "of best", "rounds", ""),
        tuple(
            (
                cell.engine,
                block_text(cell.bs),
                str(cell.iodepth),
                rate_text(cell.score_bw_bytes),
                share_text(cell.score_bw_bytes / best) if best else "",
                str(len(cell.rounds)),
                "chosen" if cell == result.chosen else "",
            )
            for cell in shown
        ),
        {index: "good" for index, cell in enumerate(shown) if cell == result.chosen},
    )
    if result.replay is not None:
        yield _replay_sheet(result, result.replay)
    yield Sheet(
        "the choice",
        (),
        (
            ("io_daemon", json.dumps(result.io_daemon)),  # as a configuration has it
            ("remembered in", result.remembered_in or "nowhere: write it into the job's configuration"),
        ),
    )
    if result.confirmation is not None:
        yield from _io_sheets(result.confirmation, "chosen setting, ")


def _replay_sheet(result: SweepResult, replay: SweepReplay) -> Sheet:
    shortest_s = replay.finalists[0].step_s
    chosen = [setting_of(finalist) == setting_of(result.chosen) for finalist in replay.finalists]
    return Sheet(
        f"a training step with each finalist, in turns ({replay.trace}, {binary_bytes_text(replay.state_bytes)} each)",
        ("engine", "bs", "iodepth", "step", "of best", "fastest", "slowest", "turns", ""),
        tuple(
            (
                finalist.engine,
                block_text(finalist.bs),
                str(finalist.iodepth),
                seconds_text(finalist.step_s),
                share_text(finalist.step_s / shortest_s),
                seconds_text(min(finalist.steps_s)),
                seconds_text(max(finalist.steps_s)),
                str(len(finalist.steps_s)),
                "chosen" if is_chosen else "",
            )
            for finalist, is_chosen in zip(replay.finalists, chosen, strict=True)
        ),
        {index: "good" for index, is_chosen in enumerate(chosen) if is_chosen},
        "A turn is one step of each. Of those that the first does not beat by more than turns differ, the nearest to "
        f"the default ({block_text(BLOCK_BYTES)}, {QUEUE_DEPTH}) is chosen.",
    )


def setting_of(cell: SweepCell | SweepFinalist) -> tuple[str, int, int]:
    """What tells one setting from another."""
    return cell.engine, cell.bs, cell.iodepth


def _compare_sheet(result: CompareResult) -> Sheet:
    lines = result.lines
    return Sheet(
        f"against {result.fio_version}, medians of {len(lines[0].pairs) if lines else 0} pairs",
        ("load", "figure", "ours", "fio", "ratio", "fio/fio", ""),
        tuple(
            # a load is named once, above its figures
            _compare_row(line, "" if index and load_text(lines[index - 1]) == load_text(line) else load_text(line))
            for index, line in enumerate(lines)
        ),
        {index: "good" if line.inside else "bad" for index, line in enumerate(lines)},
        "p50, p99: of clat. fio/fio: what two equal runs of fio differ by; CPU/GB has a bound of its own.",
    )


def _compare_row(line: CompareLine, load: str) -> tuple[str, ...]:
    return (
        load,
        METRIC_NAMES[line.metric],
        metric_text(line, statistics.median(pair.ours for pair in line.pairs)),
        metric_text(line, statistics.median(pair.fio for pair in line.pairs)),
        f"{line.ratio:.3f}",
        "–".join(f"{bound:.2f}" if bound < 10 else f"{bound:.1f}" for bound in line.fio_spread),
        "ok" if line.inside else "OUT",
    )


def load_text(line: CompareLine) -> str:
    return f"{line.rw} {line.engine} {block_text(line.bs)}×{line.iodepth}"


def metric_text(line: CompareLine, value: float) -> str:
    match line.metric:
        case "bw_bytes":
            return rate_text(value)
        case "cpu_s_per_gb":
            return f"{value:.3f} s"
        case _:
            return latency_text(value)


def _step_sheet(result: StepResult) -> Sheet:
    runs = f"{seconds_text(min(result.steps_s))} to {seconds_text(max(result.steps_s))}"
    in_update = f"{seconds_text(result.update_stall_s)} of it in the update"
    rows = (
        ("model", f"{result.model}, {count_text(result.num_params)} parameters"),
        ("trained by", world_text(result.num_nodes, result.ranks_per_node)),
        ("step", f"{seconds_text(result.step_s)} ({result.num_steps} replayed: {runs})"),
        *_tokens_rows(result),
        ("compute", f"{seconds_text(result.compute_s)} of forward and backward"),
        ("update", seconds_text(result.update_s)),
        ("stall", f"{seconds_text(result.stall_s)}, {share_text(result.stall_share)} of the step; {in_update}"),
        ("read per step", decimal_bytes_text(result.read_bytes)),
        ("written per step", decimal_bytes_text(result.write_bytes)),
        ("written per day", decimal_bytes_text(result.bytes_per_day_written)),
        ("drive life", drive_life_text(result)),
        ("cpu offload", f"{seconds_text(result.cpu_offload_step_s)} a step"),
        ("break-even", result.break_even_note),
        ("host budget", f"{binary_bytes_text(result.host_budget_bytes)}, in which the daemon decides what stays"),
        ("replayed", f"{share_text(result.scale)} of the state, in {binary_bytes_text(result.arena_bytes)} of memory"),
    )
    return Sheet(f"prediction for {result.trace}", (), rows)


def _tokens_rows(result: StepResult) -> Iterator[tuple[str, str]]:
    if result.tokens_per_step is None or result.node_tokens_per_step is None:
        return
    for name, tokens in (("tokens", result.tokens_per_step), ("on this node", result.node_tokens_per_step)):
        yield name, f"{count_text(tokens)} a step, {number_text(tokens / result.step_s)} a second"
        if result.num_nodes == 1:
            return


def drive_life_text(result: StepResult) -> str:
    if result.drive_life_days is None:
        return result.drive_life_note
    return f"{count_text(result.drive_life_days)} days; {result.drive_life_note}"

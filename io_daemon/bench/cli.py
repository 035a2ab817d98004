"""``io-daemon bench DIRECTORY`` and ``io-daemon bench io | sweep | step | compare``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from io_daemon.bench.advice import advise_compare, advise_io, advise_sweep
from io_daemon.bench.compare import CompareSettings, run_compare
from io_daemon.bench.engines.factory import ENGINES, REACTOR_ENGINES, engine_problem
from io_daemon.bench.progress import LiveProgress
from io_daemon.bench.report.baseline import (
    compare_with_baseline,
    no_longer_steady,
    parse_percent,
    refuse_other,
)
from io_daemon.bench.report.files import check_files, check_names, load_baseline
from io_daemon.bench.report.table import print_report
from io_daemon.bench.result import IoResult, Report
from io_daemon.bench.run import Observer, run_io
from io_daemon.bench.settings import RW, TRAINING_READ_PERCENT, WRITE_LIMIT_BYTES, IoSettings
from io_daemon.bench.steps.step import advise_step, run_step
from io_daemon.bench.steps.step_settings import StepSettings, add_step_options
from io_daemon.bench.sweep import SweepSettings, run_sweep
from io_daemon.command.console import open_console
from io_daemon.command.interrupt import end_with, interruptible
from io_daemon.command.options import parse_fault, parse_path, settings_from
from io_daemon.command.outcome import EXIT_OK
from io_daemon.command.sizes import parse_bytes, parse_seconds
from io_daemon.command.units import UNKNOWN
from io_daemon.config import UNLIMITED_BYTES
from io_daemon.errors import ConfigError
from io_daemon.machine.facts import as_text, describe_machine, package_version

EXIT_REGRESSION: Final = 4
EXIT_BAD_DATA: Final = 5

LimitedSettings = TypeVar("LimitedSettings", IoSettings, SweepSettings, CompareSettings)


def add_bench(bench: argparse.ArgumentParser) -> None:
    """Mount the sub-commands."""
    kinds = bench.add_subparsers(required=True, prog="io-daemon bench", metavar="io | sweep | step | compare")
    _add_io(kinds)
    _add_sweep(kinds)
    _add_step(kinds)
    _add_compare(kinds)


def _add_io(kinds: argparse._SubParsersAction[Any]) -> None:
    io = kinds.add_parser("io", help="read, write or mix with one setting", description="Measure one setting.")
    _add_directories(io)
    io.add_argument("--rw", choices=RW, default="rw", help="default: rw, as training does")
    io.add_argument(
        "--rwmixread", type=int, default=TRAINING_READ_PERCENT, help="percent of reads in a mix; default: training's 53"
    )
    io.add_argument("--bs", type=parse_bytes, metavar="BYTES", default=1 << 20, help="bytes of one I/O; default: 1M")
    io.add_argument("--iodepth", type=int, default=32, help="I/Os in flight per job; default: 32")
    io.add_argument("--numjobs", type=int, default=1, help="jobs per directory, each with its own file; default: 1")
    io.add_argument(
        "--engine", choices=("auto", *ENGINES), default="auto", help="default: auto, the best of those training uses"
    )
    io.add_argument(
        "--memory",
        choices=("host", "gpu"),
        default="host",
        help="of the buffers; gpu with --engine kvikio; default: host",
    )
    _add_time(io, "--runtime", "runtime_s", 10.0, "measured time; default: 10s")
    _add_time(io, "--ramp-time", "ramp_time_s", 1.0, "before it, not counted; default: 1s")
    io.add_argument("--verify", type=int, choices=(0, 1), default=1, help="read all back and compare; default: 1")
    io.add_argument(
        "--inject-fault", dest="faults", type=parse_fault, action="append", default=[], help=argparse.SUPPRESS
    )
    _add_file_options(io)
    _add_output_options(io)
    io.set_defaults(run=_run_io, parser=io)


def _add_sweep(kinds: argparse._SubParsersAction[Any]) -> None:
    sweep = kinds.add_parser(
        "sweep",
        help="find the best engine, block size and queue depth",
        description="Find the fastest setting for training's mix, remember it for this machine, and measure it.",
    )
    _add_directories(sweep)
    sweep.add_argument("--engines", type=_comma, default=REACTOR_ENGINES, help=f"default: {','.join(REACTOR_ENGINES)}")
    _add_time(sweep, "--cell-time", "cell_s", 0.4, "of one round of a cell; default: 0.4s")
    _add_time(sweep, "--confirm-time", "confirm_s", 15.0, "of the chosen setting; default: 15s")
    sweep.add_argument("--exhaustive", action="store_true", help="every cell of the grid, which takes long")
    sweep.add_argument("--no-remember", dest="remember", action="store_false", help='do not keep the result for "auto"')
    sweep.add_argument("--png", type=parse_path, metavar="FILE", help="write the heat-map there")
    _add_file_options(sweep, direct=False)
    _add_output_options(sweep)
    sweep.set_defaults(run=_run_sweep, parser=sweep)


def _add_step(kinds: argparse._SubParsersAction[Any]) -> None:
    step = kinds.add_parser(
        "step",
        help="replay a training step and predict its time, and the drive's life",
        description="Replay the I/O of a training step through a real daemon, beside the load of its computing.",
    )
    _add_directories(step)
    add_step_options(step)
    _add_write_limit(step)
    _add_output_options(step)
    step.add_argument("--parent-pidfd", type=int, help=argparse.SUPPRESS)  # of the `infinity plan` that started it
    step.set_defaults(run=_run_step, parser=step)


def _add_compare(kinds: argparse._SubParsersAction[Any]) -> None:
    compare = kinds.add_parser(
        "compare", help="the same load by fio, side by side", description="Run fio and this tool in turns on one file."
    )
    compare.add_argument("directory", type=parse_path, help="where to measure")
    compare.add_argument(
        "--rw",
        dest="rws",
        type=_comma,
        default=("read",),
        help="default: read; read,write,randrw writes hundreds of GB",
    )
    compare.add_argument("--rwmixread", type=int, default=50, help="percent of reads in a mix; default: 50")
    compare.add_argument("--engines", type=_comma, default=("io_uring", "libaio"), help="default: io_uring,libaio")
    compare.add_argument(
        "--bs",
        dest="block_sizes",
        type=_comma_bytes,
        metavar="BYTES",
        default=(1 << 20,),
        help="one or more; default: 1M",
    )
    compare.add_argument(
        "--iodepth", dest="iodepths", type=_comma_int, metavar="N", default=(32,), help="one or more; default: 32"
    )
    compare.add_argument("--pairs", type=int, default=10, help="turns of fio, ours, ours, fio; default: 10")
    _add_time(compare, "--runtime", "runtime_s", 1.0, "of one run; default: 1s")
    _add_time(compare, "--ramp-time", "ramp_time_s", 0.3, "before it; default: 0.3s")
    _add_file_options(compare)
    _add_output_options(compare)
    compare.set_defaults(run=_run_compare, parser=compare)


def _add_directories(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directories",
        type=parse_path,
        nargs="+",
        metavar="directory",
        help="where to measure; several are loaded at once",
    )


def _add_time(parser: argparse.ArgumentParser, option: str, field: str, default_s: float, text: str) -> None:
    parser.add_argument(option, dest=field, type=parse_seconds, metavar="TIME", default=default_s, help=text)


def _add_file_options(parser: argparse.ArgumentParser, *, direct: bool = True) -> None:
    parser.add_argument(
        "--size", type=parse_bytes, metavar="BYTES", default=2 << 30, help="bytes of each file; default: 2G"
    )
    if direct:
        parser.add_argument("--direct", type=int, choices=(0, 1), default=1, help="bypass the page cache; default: 1")
    parser.add_argument("--seed", type=int, default=1, help="of data and order; default: 1")
    _add_write_limit(parser)


def _add_write_limit(parser: argparse.ArgumentParser) -> None:
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument(
        "--write-limit",
        dest="write_limit_bytes",
        type=parse_bytes,
        metavar="BYTES",
        default=WRITE_LIMIT_BYTES,
        help=f"write no more than this; default: {WRITE_LIMIT_BYTES >> 30}G",
    )
    limit.add_argument(
        "--yes", dest="write_limit_bytes", action="store_const", const=UNLIMITED_BYTES, help="no write limit"
    )


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON (see docs/bench-schema.json)")
    parser.add_argument("--html", type=parse_path, metavar="FILE", help="write a report with plots there, one file")
    parser.add_argument(
        "--baseline", type=parse_path, metavar="FILE", help="an earlier report (--json) to compare with"
    )
    parser.add_argument(
        "--max-regression",
        type=parse_percent,
        metavar="PERCENT",
        default=0.10,
        help=f"with --baseline: exit with {EXIT_REGRESSION} beyond this; default: 10%%",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _run_io(arguments: argparse.Namespace) -> int:
    engine = _best_engine() if arguments.engine == "auto" else arguments.engine
    settings = settings_from(arguments, IoSettings, engine=engine)
    settings = _with_leave_to_write(settings, settings.layout_bytes)
    return _report(
        arguments,
        "io",
        settings,
        settings.directories,
        lambda observer: run_io(settings, observer),
        lambda result: advise_io(settings, result),
    )


def _run_sweep(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments, SweepSettings)
    settings = _with_leave_to_write(settings, settings.size * len(settings.directories))
    return _report(
        arguments,
        "sweep",
        settings,
        settings.directories,
        lambda observer: run_sweep(settings, observer),
        advise_sweep,
    )


def _run_step(arguments: argparse.Namespace) -> int:
    engine = None if arguments.engine == "auto" else arguments.engine
    settings = settings_from(arguments, StepSettings, engine=engine)
    if arguments.parent_pidfd is not None:
        end_with(arguments.parent_pidfd)
    return _report(
        arguments,
        "step",
        settings,
        settings.directories,
        lambda observer: run_step(settings, observer),
        advise_step,
    )


def _run_compare(arguments: argparse.Namespace) -> int:
    settings = settings_from(arguments, CompareSettings)
    settings = _with_leave_to_write(settings, settings.size)
    return _report(
        arguments,
        "compare",
        settings,
        (settings.directory,),
        lambda observer: run_compare(settings, observer),
        advise_compare,
    )


def _report(
    arguments: argparse.Namespace,
    kind: Any,
    settings: BaseModel,
    directories: Sequence[Path],
    measure: Callable[[Observer], Any],
    advise: Callable[[Any], str],
) -> int:
    """Measure, print, write what was asked for; the exit code."""
    check_names(directories)
    check_files({name: getattr(arguments, name, None) for name in ("html", "png")})
    baseline = load_baseline(arguments.baseline) if arguments.baseline else None
    settings_values = json.loads(settings.model_dump_json())
    machine = describe_machine(directories).model_dump(mode="json")
    if baseline is not None:
        refuse_other(baseline, kind, settings_values, machine)
    started = datetime.now(UTC)
    with interruptible(), LiveProgress(enabled=not arguments.quiet and sys.stderr.isatty()) as progress:
        result = measure(progress)
    report = Report(
        kind=kind,
        version=package_version() or UNKNOWN,
        started=started.isoformat(timespec="seconds"),
        command=["io-daemon", *map(as_text, sys.argv[1:])],
        settings=settings_values,
        machine=machine,
        result=result,
        advice=advise(result),
    )
    if arguments.json:
        print(report.model_dump_json(indent=2))
    else:
        print_report(report, open_console())
    if getattr(arguments, "png", None):
        from io_daemon.bench.report.plot import write_heat_map

        write_heat_map(result, arguments.png)
    if arguments.html:
        from io_daemon.bench.report.page import write_page

        write_page(report, arguments.html)
    if _has_bad_blocks(result):
        return EXIT_BAD_DATA
    if baseline is None:
        return EXIT_OK
    regressions = compare_with_baseline(report, baseline, arguments.max_regression)
    for regression in regressions:
        print(f"io-daemon: regression: {regression}", file=sys.stderr)
    if (unsteady := no_longer_steady(report, baseline)) is not None:
        print(f"io-daemon: {unsteady}", file=sys.stderr)
    return EXIT_REGRESSION if regressions else EXIT_OK


def _has_bad_blocks(result: Any) -> bool:
    measured = getattr(result, "confirmation", result)
    return isinstance(measured, IoResult) and measured.has_bad_blocks


def _with_leave_to_write(settings: LimitedSettings, layout_bytes: int) -> LimitedSettings:
    """Asks, at a terminal, if laying out alone would pass the limit; in a script the measurement refuses."""
    if layout_bytes <= settings.write_limit_bytes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return settings
    print(f"This writes {layout_bytes / 1e9:.0f} GB and more. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return settings
    return settings.model_copy(update={"write_limit_bytes": UNLIMITED_BYTES})


def _best_engine() -> str:
    for name in REACTOR_ENGINES:
        if engine_problem(name) is None:
            return name
    raise ConfigError("engine", "auto", f"none of {', '.join(REACTOR_ENGINES)} works here; see `infinity doctor`")


def _comma(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _comma_bytes(text: str) -> tuple[int, ...]:
    return tuple(parse_bytes(part) for part in text.split(","))


def _comma_int(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers with commas between them") from None

"""``bench compare``: fio and this tool in turns on one file, so that a difference is the tool's and not the minute's.
Both move their blocks to and from memory of one kind.

Runs go A B B A: what drifts in a straight line meets both alike. fio against itself, first and last run of each such
turn, says how far apart two equal runs lie on this machine; a ratio inside that is no difference.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from io_daemon.bench.fio import Figures, buffer_bytes, fio_version, run_fio
from io_daemon.bench.job import open_buffers_for
from io_daemon.bench.result import CompareLine, ComparePair, CompareResult, IoResult
from io_daemon.bench.run import Bench, Observer, Silent, cache_warnings, check_memory, open_bench, open_targets
from io_daemon.bench.settings import WRITE_LIMIT_BYTES, Each, IoSettings, Rw, check_limit
from io_daemon.command.units import block_text
from io_daemon.config import UNLIMITED_BYTES, resolved
from io_daemon.errors import ConfigError

RUNS_PER_TURN: Final = 4
REST_S, FIO_START_S = 0.3, 0.2
"""Before every run: a drive behind a rate limit, as cloud volumes are, owes a burst to whoever rested. fio rests while
it starts, so ours rest longer by that."""
METRICS: Final = ("bw_bytes", "clat_p50_ns", "clat_p99_ns", "cpu_s_per_gb")
CPU_RATIO_MAX: Final = 1.20
"""CPU per GB has a bound of its own: fio's spread says nothing about what a library costs."""


class CompareSettings(BaseModel):
    """Every combination of these is compared, on one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path
    rws: Each[Rw] = ("read",)
    rwmixread: Annotated[int, Field(ge=0, le=100)] = 50
    engines: Each[Literal["io_uring", "libaio"]] = ("io_uring", "libaio")
    """fio's synchronous engines know no depth, only processes: another load than threads on one file."""
    block_sizes: Each[Annotated[int, Field(ge=512)]] = (1 << 20,)
    iodepths: Each[int] = (32,)
    pairs: Annotated[int, Field(ge=1, le=1000)] = 10
    direct: bool = True
    size: Annotated[int, Field(ge=1 << 20)] = 2 << 30
    runtime_s: Annotated[float, Field(ge=0.2, le=3600)] = 1.0
    ramp_time_s: Annotated[float, Field(ge=0, le=60)] = 0.3
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 1
    write_limit_bytes: Annotated[int, Field(ge=0)] = WRITE_LIMIT_BYTES

    @field_validator("directory")
    @classmethod
    def _resolved(cls, value: Path) -> Path:
        return resolved(value, "directory")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self._whole_size == 0:
            step = math.lcm(*self.block_sizes)
            raise ConfigError(
                "size", self.size, f"holds no whole number of blocks of every size: raise it to {2 * step}"
            )
        return self

    @property
    def _whole_size(self) -> int:
        """The size of the one file, which blocks of every size fill to its end."""
        step = math.lcm(*self.block_sizes)
        return self.size // step * step

    def combinations(self) -> Iterator[IoSettings]:
        for rw, engine, bs, iodepth in itertools.product(self.rws, self.engines, self.block_sizes, self.iodepths):
            yield IoSettings(
                directories=(self.directory,),
                rw=rw,
                rwmixread=self.rwmixread,
                engine=engine,
                bs=bs,
                iodepth=iodepth,
                direct=self.direct,
                size=self._whole_size,
                runtime_s=self.runtime_s,
                ramp_time_s=self.ramp_time_s,
                seed=self.seed,
                verify=False,
                write_limit_bytes=UNLIMITED_BYTES,  # of all runs together, see check_writes
            )


def run_compare(settings: CompareSettings, observer: Observer | None = None) -> CompareResult:
    """Raises ConfigError without fio, SwapSpaceError, DeviceIOError, WorldError; leaves no file behind."""
    observer = observer or Silent()
    combinations = list(settings.combinations())
    check_limit(combinations[0].model_copy(update={"write_limit_bytes": settings.write_limit_bytes}))
    for combination in combinations:
        check_memory(combination, beside_bytes=buffer_bytes(combination))
    version = fio_version()  # what was typed is judged first, with fio or without
    lines: list[CompareLine] = []
    with open_targets(combinations[0]) as targets:
        with open_bench(combinations[0], targets) as bench:
            begin = time.perf_counter()
            bench.lay_out(observer)
            write_bw_bytes = combinations[0].layout_bytes / (time.perf_counter() - begin)
        check_writes(settings, combinations, write_bw_bytes)
        for combination in combinations:
            name = (
                f"{combination.rw} {combination.engine} bs {block_text(combination.bs)} iodepth {combination.iodepth}"
            )
            observer.phase(name, settings.pairs)
            with (
                open_bench(combination, targets) as bench,
                open_buffers_for(combination, buffer_bytes(combination)) as buffers,
            ):
                turns = [_turn(bench, buffers.path, number, observer) for number in range(settings.pairs)]
            lines += compare_turns(combination, turns)
        warnings = cache_warnings(combinations[0], targets)
    return CompareResult(lines=lines, fio_version=version, warnings=warnings)


def check_writes(settings: CompareSettings, combinations: Sequence[IoSettings], write_bw_bytes: float) -> None:
    """Raises ConfigError if the runs would write beyond the limit, at the rate that laying out had."""
    shares = [
        1 - combination.rwmixread / 100 if combination.mixed else combination.writes for combination in combinations
    ]
    run_bytes = write_bw_bytes * (settings.runtime_s + settings.ramp_time_s)
    expected_bytes = combinations[0].layout_bytes + RUNS_PER_TURN * settings.pairs * run_bytes * sum(shares)
    if expected_bytes > settings.write_limit_bytes:
        raise ConfigError(
            "write_limit",
            settings.write_limit_bytes,
            f"these runs would write about {expected_bytes / 1e9:.0f} GB: ask for less, raise --write-limit, or "
            "say --yes",
        )


Turn = tuple[Figures, Figures, Figures, Figures]
"""fio, ours, ours, fio."""


def _turn(bench: Bench, buffers: Path, number: int, observer: Observer) -> Turn:
    path = bench.jobs[0].target.path
    ours: list[Figures] = []
    time.sleep(REST_S)
    first = run_fio(bench.settings, path, buffers)
    for _ in range(2):
        time.sleep(REST_S + FIO_START_S)
        ours.append(figures_of(bench.measure(Silent())))
    time.sleep(REST_S)
    last = run_fio(bench.settings, path, buffers)
    observer.progress(number + 1)
    return first, ours[0], ours[1], last


def figures_of(result: IoResult) -> Figures:
    """Figures of ours, in the same terms as fio's."""
    ways = [way for way in (result.read, result.write) if way is not None]
    main = ways[0]  # reads, where there are any
    return Figures(
        bw_bytes=sum(way.bw_bytes for way in ways),
        clat_p50_ns=main.clat.p50_ns,
        clat_p99_ns=main.clat.p99_ns,
        cpu_s_per_gb=result.cpu.s_per_gb,
    )


def compare_turns(settings: IoSettings, turns: Sequence[Turn]) -> list[CompareLine]:
    """A line for each metric. Pure."""
    return [_line(settings, metric, turns) for metric in METRICS]


def _line(
    settings: IoSettings,
    metric: Literal["bw_bytes", "clat_p50_ns", "clat_p99_ns", "cpu_s_per_gb"],
    turns: Sequence[Turn],
) -> CompareLine:
    values = [[float(getattr(figures, metric)) for figures in turn] for turn in turns]
    pairs = [
        ComparePair(ours=(ours_1 + ours_2) / 2, fio=(fio_1 + fio_2) / 2) for fio_1, ours_1, ours_2, fio_2 in values
    ]
    ratio = statistics.median(pair.ours / pair.fio for pair in pairs)
    against_itself = [last / first for first, _, _, last in values]
    against_itself += [1 / each for each in against_itself]  # which of two equal runs comes first means nothing
    low, high = min(against_itself), max(against_itself)
    inside = ratio <= CPU_RATIO_MAX if metric == "cpu_s_per_gb" else low <= ratio <= high
    return CompareLine(
        rw=settings.rw,
        engine=settings.engine,
        bs=settings.bs,
        iodepth=settings.iodepth,
        metric=metric,
        pairs=pairs,
        ratio=ratio,
        fio_spread=(low, high),
        inside=inside,
    )

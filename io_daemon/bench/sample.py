"""Totals taken at moments, and what lies between two of them: rates, latencies, a time series. Pure."""

from __future__ import annotations

import itertools
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from io_daemon.bench.engines.engine import Counters
from io_daemon.bench.latency import Histogram, StageLatencies
from io_daemon.bench.result import Cpu, Direction, LatencySummary, TimeSeries


@dataclass(frozen=True)
class Sample:
    """What all jobs together have done."""

    at_s: float
    """The time by a steady clock."""
    cpu_user_s: float
    cpu_system_s: float
    counters: Counters
    clat: Histogram
    """Reads and writes are counted together, since the last reset."""

    @property
    def moved_bytes(self) -> int:
        return self.counters.read_bytes + self.counters.write_bytes


def cpu_seconds() -> tuple[float, float]:
    """User and system time of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def cpu_between(begin: Sample, end: Sample) -> Cpu:
    user_s, system_s = end.cpu_user_s - begin.cpu_user_s, end.cpu_system_s - begin.cpu_system_s
    moved_gb = (end.moved_bytes - begin.moved_bytes) / 1e9
    return Cpu(user_s=user_s, system_s=system_s, s_per_gb=(user_s + system_s) / moved_gb if moved_gb else 0.0)


def direction_between(begin: Sample, end: Sample, latencies: StageLatencies, *, write: bool) -> Direction | None:
    """None if nothing went that way."""
    first, last = begin.counters, end.counters
    if write:
        io_bytes, num_ios = last.write_bytes - first.write_bytes, last.num_writes - first.num_writes
    else:
        io_bytes, num_ios = last.read_bytes - first.read_bytes, last.num_reads - first.num_reads
    seconds = end.at_s - begin.at_s
    if num_ios == 0:
        return None
    return Direction(
        io_bytes=io_bytes,
        num_ios=num_ios,
        bw_bytes=io_bytes / seconds,
        iops=num_ios / seconds,
        slat=summarise(latencies.slat),
        clat=summarise(latencies.clat),
        lat=summarise(latencies.lat),
    )


def summarise(histogram: Histogram) -> LatencySummary:
    return LatencySummary(
        num_ios=histogram.num,
        min_ns=histogram.min_ns,
        mean_ns=histogram.mean_ns,
        p50_ns=histogram.percentile(50),
        p99_ns=histogram.percentile(99),
        p999_ns=histogram.percentile(99.9),
        max_ns=histogram.max_ns,
    )


def series_of(ramp: Sequence[Sample], measured: Sequence[Sample]) -> TimeSeries:
    """Rates between neighbours; the latencies are counted anew when the ramp ends."""
    zero_s = measured[0].at_s
    pairs = [pair for part in (ramp, measured) for pair in itertools.pairwise(part)]
    lengths = [after.at_s - before.at_s for before, after in pairs]
    return TimeSeries(
        interval_s=sum(lengths) / len(lengths) if lengths else 0.0,
        at_s=[(before.at_s + after.at_s) / 2 - zero_s for before, after in pairs],
        read_bw_bytes=[
            (after.counters.read_bytes - before.counters.read_bytes) / seconds
            for (before, after), seconds in zip(pairs, lengths, strict=True)
        ],
        write_bw_bytes=[
            (after.counters.write_bytes - before.counters.write_bytes) / seconds
            for (before, after), seconds in zip(pairs, lengths, strict=True)
        ],
        clat_p99_ns=[(after.clat - before.clat).percentile(99) for before, after in pairs],
    )

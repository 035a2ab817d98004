"""What lies between two moments of a measurement is counted, and nothing before."""

from __future__ import annotations

import threading
import time

import pytest

from io_daemon.bench.engines.engine import Counters
from io_daemon.bench.latency import Histogram, StageLatencies
from io_daemon.bench.sample import Sample, cpu_between, cpu_seconds, direction_between, series_of, summarise

GB = 10**9


def histogram(*samples: tuple[int, int]) -> Histogram:
    """Nanoseconds, and how many took them."""
    made = Histogram()
    for ns, num in samples:
        for _ in range(num):
            made.record(ns)
    return made


def sample(
    at_s: float, *, reads: int = 0, writes: int = 0, cpu_s: float = 0.0, clat: Histogram | None = None
) -> Sample:
    """Each I/O is one of a GB."""
    return Sample(at_s, cpu_s, 0.0, Counters(reads * GB, writes * GB, reads, writes, 0), clat or Histogram())


def test_each_percentile_is_its_own() -> None:
    found = summarise(histogram((100, 9800), (10_000, 180), (1_000_000, 20)))
    assert (found.p50_ns, found.p99_ns, found.p999_ns) == pytest.approx((100, 10_000, 1_000_000), rel=0.02)


def test_cpu_is_that_of_the_bytes_that_moved_meanwhile() -> None:
    cpu = cpu_between(sample(0, reads=6, cpu_s=1.0), sample(1, reads=8, cpu_s=5.0))
    assert cpu.s_per_gb == pytest.approx(2.0)


def test_cpu_time_is_that_of_all_threads() -> None:
    def work() -> None:
        until = time.thread_time() + 0.1
        while time.thread_time() < until:
            pass

    before_s = sum(cpu_seconds())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert sum(cpu_seconds()) - before_s >= 0.09


@pytest.mark.parametrize("write", [False, True])
def test_rates_are_of_what_moved_between_two_samples(write: bool) -> None:
    latencies = StageLatencies(histogram((10, 5)), histogram((20, 5)), histogram((30, 5)))
    found = direction_between(sample(1, reads=5, writes=5), sample(3, reads=9, writes=9), latencies, write=write)
    assert found is not None
    assert (found.io_bytes, found.num_ios, found.bw_bytes, found.iops) == (4 * GB, 4, 2 * GB, 2.0)
    assert (found.slat.p50_ns, found.clat.p50_ns, found.lat.p50_ns) == (10, 20, 30)


def test_a_series_has_each_interval_s_own_latencies_and_begins_with_the_measured_time() -> None:
    ramp = [sample(0), sample(1, reads=1, clat=histogram((50, 1)))]
    slow, both = histogram((1_000_000, 100)), histogram((1_000_000, 100), (100, 100))
    measured = [sample(1, reads=1), sample(2, reads=2, clat=slow), sample(3, reads=3, clat=both)]
    series = series_of(ramp, measured)
    assert series.at_s == [-0.5, 0.5, 1.5]
    assert series.clat_p99_ns == pytest.approx([50, 1_000_000, 100], rel=0.02)

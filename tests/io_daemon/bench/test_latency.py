"""Histograms: the same buckets in C++ and Python, and percentiles as numpy finds them in the raw samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from io_daemon._native import NUM_LATENCY_BUCKETS, latency_bucket
from io_daemon.bench.latency import Histogram, Latencies, bounds_of

NS = st.one_of(st.integers(0, 300), st.integers(0, 10**7), st.integers(0, 2**53))
SAMPLES = st.lists(NS, min_size=1, max_size=200)


def counted(samples: list[int]) -> Histogram:
    histogram = Histogram()
    for ns in samples:
        histogram.record(ns)
    return histogram


def test_bounds_are_those_that_cpp_counts_in() -> None:
    next_ns = 0
    for bucket in range(NUM_LATENCY_BUCKETS):
        lowest, highest = bounds_of(bucket)
        assert lowest == next_ns
        assert latency_bucket(lowest) == latency_bucket(highest) == bucket
        assert highest - lowest <= lowest / 64
        next_ns = highest + 1
    assert next_ns == 2**64


@given(st.integers(0, 2**64 - 1))
def test_any_latency_falls_into_one_bucket(ns: int) -> None:
    lowest, highest = bounds_of(latency_bucket(ns))
    assert lowest <= ns <= highest


@given(SAMPLES, st.floats(0, 100))
def test_percentiles_are_those_of_the_samples(samples: list[int], q: float) -> None:
    histogram = counted(samples)
    exact = int(np.percentile(np.array(samples, dtype=np.int64), q, method="inverted_cdf"))
    assert abs(histogram.percentile(q) - exact) <= exact / 64


@given(SAMPLES)
def test_figures_are_exact_where_they_are_said_to_be(samples: list[int]) -> None:
    histogram = counted(samples)
    assert (histogram.num, histogram.sum_ns) == (len(samples), sum(samples))
    assert (histogram.min_ns, histogram.max_ns) == (min(samples), max(samples))
    assert histogram.mean_ns == pytest.approx(sum(samples) / len(samples))
    assert min(samples) <= histogram.percentile(0) <= histogram.percentile(100) <= max(samples)


@given(SAMPLES, SAMPLES)
def test_sums_and_differences(first: list[int], second: list[int]) -> None:
    whole = counted(first + second)
    total = counted(first) + counted(second)
    assert (total.counts == whole.counts).all()
    assert (total.num, total.sum_ns, total.min_ns, total.max_ns) == (
        whole.num,
        whole.sum_ns,
        whole.min_ns,
        whole.max_ns,
    )
    since = whole - counted(first)
    assert (since.counts == counted(second).counts).all()
    assert (since.num, since.sum_ns) == (len(second), sum(second))
    assert latency_bucket(since.min_ns) == latency_bucket(min(second))
    assert latency_bucket(since.max_ns) == latency_bucket(max(second))
    for q in (0, 50, 99, 100):
        assert since.percentile(q) == pytest.approx(counted(second).percentile(q), rel=1 / 64)


def test_of_nothing() -> None:
    empty = Histogram()
    assert (empty.percentile(50), empty.mean_ns, empty.min_ns, empty.max_ns) == (0, 0.0, 0, 0)
    some = counted([7, 9])
    assert ((some + empty).min_ns, (empty + some).max_ns) == (7, 9)
    assert (some - some).num == 0
    with pytest.raises(ValueError, match="101"):
        some.percentile(101)


def test_copies_stay_as_they_are() -> None:
    latencies = Latencies()
    latencies.read.record(100, 2000)
    before = latencies.copy()
    latencies.read.record(100, 2000)
    latencies.write.record(5, 5)
    since = latencies - before
    assert (before.read.lat.num, before.read.lat.min_ns) == (1, 2100)
    assert (since.read.clat.num, since.write.slat.num, since.write.lat.max_ns) == (1, 1, 10)
    assert ((before + since).read.slat.counts == latencies.read.slat.counts).all()

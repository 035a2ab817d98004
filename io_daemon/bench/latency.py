"""Latency histograms as csrc/latency.hpp counts them: log-linear buckets, as fio's and HdrHistogram's.

A latency of n nanoseconds falls into bucket n below 64; above, every power of two is cut into 64 equal buckets, so a
bucket is at most 1/64 of its value wide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from numpy.typing import NDArray

from io_daemon._native import NUM_LATENCY_BUCKETS, BenchReactor, latency_bucket

if TYPE_CHECKING:
    from io_daemon._native import HistogramFields, StageFields

LINEAR_BITS: Final = 6


def bounds_of(bucket: int) -> tuple[int, int]:
    """The lowest and the highest number of nanoseconds that fall into the bucket."""
    shift = max((bucket >> LINEAR_BITS) - 1, 0)
    lowest = (bucket - (shift << LINEAR_BITS)) << shift
    return lowest, lowest + (1 << shift) - 1


def _no_counts() -> NDArray[np.uint64]:
    return np.zeros(NUM_LATENCY_BUCKETS, dtype=np.uint64)


@dataclass(slots=True)
class Histogram:
    """``counts``: uint64, one per bucket. ``min_ns`` and ``max_ns`` are exact, and 0 of nothing."""

    counts: NDArray[np.uint64] = field(default_factory=_no_counts)
    num: int = 0
    sum_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0

    def record(self, ns: int) -> None:
        self.counts[latency_bucket(ns)] += np.uint64(1)
        self.min_ns = min(self.min_ns, ns) if self.num else ns
        self.max_ns = max(self.max_ns, ns)
        self.num += 1
        self.sum_ns += ns

    @property
    def mean_ns(self) -> float:
        return self.sum_ns / self.num if self.num else 0.0

    def percentile(self, q: float) -> int:
        """The ``ceil(q / 100 * num)``-th smallest latency in nanoseconds, to 1/128; 0 of nothing."""
        if not 0 <= q <= 100:
            raise ValueError(f"percentile {q} is not in 0..100")
        if self.num == 0:
            return 0
        rank = max(ceil(q / 100 * self.num), 1)
        bucket = int(np.searchsorted(np.cumsum(self.counts), rank))
        return min(max(sum(bounds_of(bucket)) // 2, self.min_ns), self.max_ns)

    def copy(self) -> Histogram:
        return Histogram(self.counts.copy(), self.num, self.sum_ns, self.min_ns, self.max_ns)

    def __add__(self, other: Histogram) -> Histogram:
        if self.num == 0 or other.num == 0:
            return (self if other.num == 0 else other).copy()
        return Histogram(
            self.counts + other.counts,
            self.num + other.num,
            self.sum_ns + other.sum_ns,
            min(self.min_ns, other.min_ns),
            max(self.max_ns, other.max_ns),
        )

    def __sub__(self, earlier: Histogram) -> Histogram:
        """What was counted since ``earlier``, a copy of this histogram. Minimum and maximum: to 1/64, as counted."""
        counts = self.counts - earlier.counts
        filled = np.flatnonzero(counts)
        if filled.size == 0:
            return Histogram()
        return Histogram(
            counts,
            self.num - earlier.num,
            self.sum_ns - earlier.sum_ns,
            max(bounds_of(int(filled[0]))[0], self.min_ns),
            min(bounds_of(int(filled[-1]))[1], self.max_ns),
        )


@dataclass(frozen=True, slots=True)
class StageLatencies:
    """fio's three: until the engine has taken the I/O, from then until it was reaped, and both."""

    slat: Histogram = field(default_factory=Histogram)
    clat: Histogram = field(default_factory=Histogram)
    lat: Histogram = field(default_factory=Histogram)

    def record(self, slat_ns: int, clat_ns: int) -> None:
        self.slat.record(slat_ns)
        self.clat.record(clat_ns)
        self.lat.record(slat_ns + clat_ns)

    def map(self, other: StageLatencies, combine: Callable[[Histogram, Histogram], Histogram]) -> StageLatencies:
        return StageLatencies(
            combine(self.slat, other.slat), combine(self.clat, other.clat), combine(self.lat, other.lat)
        )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of block I/Os whose bytes have all moved, continuations of short ones included."""

    read: StageLatencies = field(default_factory=StageLatencies)
    write: StageLatencies = field(default_factory=StageLatencies)

    @classmethod
    def of(cls, reactor: BenchReactor) -> Self:
        fields = reactor.latencies()
        return cls(_stages(fields["read"]), _stages(fields["write"]))

    def copy(self) -> Latencies:
        return self + Latencies()

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(self.read.map(other.read, Histogram.__add__), self.write.map(other.write, Histogram.__add__))

    def __sub__(self, earlier: Latencies) -> Latencies:
        """What was counted since ``earlier``, a copy of these."""
        return Latencies(
            self.read.map(earlier.read, Histogram.__sub__), self.write.map(earlier.write, Histogram.__sub__)
        )


def _stages(fields: StageFields) -> StageLatencies:
    def histogram(of: HistogramFields) -> Histogram:
        return Histogram(**of)

    return StageLatencies(histogram(fields["slat"]), histogram(fields["clat"]), histogram(fields["lat"]))

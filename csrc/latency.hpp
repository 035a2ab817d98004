// How long block I/Os take, counted in log-linear buckets as io_daemon/bench/latency.py describes
// them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace infinity {

// Of nanoseconds. Every 64-bit number has a bucket, and none is wider than 1/64 of what it holds.
struct Histogram {
  static constexpr unsigned kLinearBits = 6;
  static constexpr std::size_t kNumBuckets = std::size_t{64 - kLinearBits + 1} << kLinearBits;

  static constexpr std::size_t bucket(std::uint64_t ns) noexcept {
    constexpr int kWidth = kLinearBits + 1;
    const auto shift =
        static_cast<unsigned>(std::max(static_cast<int>(std::bit_width(ns)), kWidth) - kWidth);
    return (std::size_t{shift} << kLinearBits) + (ns >> shift);
  }

  void record(std::uint64_t ns) noexcept {
    ++counts[bucket(ns)];
    ++num;
    sum_ns += ns;
    min_ns = std::min(min_ns, ns);
    max_ns = std::max(max_ns, ns);
  }

  Histogram& operator+=(const Histogram& other) noexcept {
    for (std::size_t i = 0; i < kNumBuckets; ++i) counts[i] += other.counts[i];
    num += other.num;
    sum_ns += other.sum_ns;
    min_ns = std::min(min_ns, other.min_ns);
    max_ns = std::max(max_ns, other.max_ns);
    return *this;
  }

  std::array<std::uint64_t, kNumBuckets> counts{};
  std::uint64_t num = 0;
  std::uint64_t sum_ns = 0;
  std::uint64_t min_ns = std::numeric_limits<std::uint64_t>::max();  // of nothing
  std::uint64_t max_ns = 0;
};

static_assert(Histogram::bucket(63) == 63 && Histogram::bucket(64) == 64);
static_assert(Histogram::bucket(~std::uint64_t{0}) == Histogram::kNumBuckets - 1);

// fio's three: until the engine has taken the I/O, from then until it was reaped, and both.
struct StageLatencies {
  Histogram slat;
  Histogram clat;
  Histogram lat;

  void record(std::uint64_t slat_ns, std::uint64_t clat_ns) noexcept {
    slat.record(slat_ns);
    clat.record(clat_ns);
    lat.record(slat_ns + clat_ns);
  }
};

struct Latencies {
  StageLatencies read;
  StageLatencies write;
};

}  // namespace infinity

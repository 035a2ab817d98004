#include "bench_reactor.hpp"

#include <utility>

namespace infinity {

BenchReactor::BenchReactor(std::unique_ptr<IoEngine> engine, unsigned queue_depth,
                           std::uint32_t block_bytes)
    : Reactor(std::move(engine), queue_depth, block_bytes, std::make_unique<Latencies>()) {}

Latencies BenchReactor::latencies() const {
  const std::lock_guard lock(mutex_);
  return *latencies_;
}

Histogram BenchReactor::clat() const {
  const std::lock_guard lock(mutex_);
  Histogram clat = latencies_->read.clat;
  return clat += latencies_->write.clat;
}

void BenchReactor::reset_latencies() {
  const std::lock_guard lock(mutex_);
  *latencies_ = {};
}

}  // namespace infinity

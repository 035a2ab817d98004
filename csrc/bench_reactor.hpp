// A reactor whose block I/Os are timed, for the bench.
#pragma once

#include "reactor.hpp"

namespace infinity {

class BenchReactor final : public Reactor {
 public:
  BenchReactor(std::unique_ptr<IoEngine> engine, unsigned queue_depth, std::uint32_t block_bytes);

  // Of block I/Os whose bytes have all moved, continuations included, since the last reset.
  Latencies latencies() const;
  Histogram clat() const;  // reads and writes together: less to copy
  void reset_latencies();
};

}  // namespace infinity

// Both sides of the reactor: what its callers and its thread share (under a mutex), and what only
// the thread touches. See reactor.hpp for the public face.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>

#include "active_request.hpp"
#include "descriptor.hpp"

namespace infinity {

class ReactorCore {
 public:
  ReactorCore(std::unique_ptr<IoEngine> engine, unsigned queue_depth, std::uint32_t block_bytes);

  int event_fd() const noexcept { return completed_event_.get(); }
  const std::string& engine_name() const noexcept { return engine_name_; }

  int add_file(int fd);
  void remove_file(int index);
  int add_buffer(std::shared_ptr<Region> region);
  void remove_buffer(int index);
  void submit(Request request);
  std::vector<Completion> reap(std::size_t completions_max);
  ReactorStats stats() const;
  Latencies latencies() const;
  Histogram clat() const;
  void reset_latencies();
  void begin_close();
  bool wait_closed(std::chrono::milliseconds timeout);

  // The body of the I/O thread.
  void run() noexcept;

 private:
  using RequestPosition = std::list<ActiveRequest>::iterator;

  // One of queue_depth cells. Its I/O may take several rounds: a short one goes on from the last
  // page boundary reached, since direct I/O takes no other offsets.
  struct Block {
    RequestPosition request;
    std::size_t index = 0;  // within the request
    BlockExtent extent;
    std::uint32_t num_done = 0;
    std::uint32_t resume_at = 0;
    unsigned num_retries = 0;
    std::uint64_t offered_ns = 0;  // to the engine for the first time; 0: not yet
    std::uint64_t taken_ns = 0;    // by the engine for the first time; 0: not yet

    IoOp op() const { return extent.place.op; }
    std::uint32_t num_bytes() const { return extent.num_bytes; }
    std::span<std::byte> bytes() const { return request->bytes(extent); }
  };

  // What is left to count of a block whose bytes have all moved.
  struct BlockTime {
    IoOp op;
    std::uint64_t slat_ns;
    std::uint64_t clat_ns;
  };

  // The callers' side, mutex_ held.
  std::shared_ptr<IoEngine> engine() const;  // takes mutex_ itself
  void refuse_if_ended() const;
  void wake_thread();

  // The I/O thread's side.
  void serve();
  bool accept_requests();
  bool send_blocks();
  void cut_blocks();
  void cut_block();
  std::size_t offer_blocks(std::size_t num_offered);
  Io describe(std::size_t cell) const;
  bool reap_blocks();
  void end_round(std::size_t cell, std::int64_t result, std::uint64_t reaped_ns);
  void count(const Block& block, std::int64_t result);
  void verify(Block& block);
  void fail(Block& block, IoStatus status, int error_number, std::uint64_t expected,
            std::uint64_t actual);
  void free_block(std::size_t cell);
  void settle(RequestPosition request);
  void publish();
  bool finished();
  void sleep();
  void abandon(int error_number) noexcept;

  const std::string engine_name_;
  const std::uint32_t block_bytes_;
  const Descriptor completed_event_;

  std::shared_ptr<IoEngine> engine_;  // shared with what is registered with it
  Table<RegisteredFile> files_{"file"};
  Table<RegisteredBuffer> buffers_{"buffer"};

  mutable std::mutex mutex_;  // guards this group
  std::condition_variable ended_condition_;
  std::deque<ActiveRequest> incoming_;
  std::deque<Completion> completed_;
  ReactorStats stats_;
  Latencies latencies_;
  std::size_t num_unreaped_ = 0;
  bool thread_sleeps_ = false;
  bool closing_ = false;
  bool ended_ = false;  // the I/O thread holds nothing any more
  int broken_errno_ = 0;

  // Only the I/O thread, from here on.
  std::list<ActiveRequest> requests_;  // in order of submission; cut ones wait for their last block
  RequestPosition next_to_cut_ = requests_.end();
  std::vector<Block> blocks_;
  std::vector<std::size_t> free_cells_;
  std::deque<std::size_t> outgoing_;  // cells to hand to the engine
  std::vector<Completion> settled_;
  ReactorStats delta_;
  std::vector<BlockTime> timed_;
  bool engine_is_stalled_ = false;
};

}  // namespace infinity

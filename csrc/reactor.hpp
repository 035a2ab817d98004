// The I/O thread: takes requests of any size, keeps queue_depth blocks of them in flight at one
// engine, and reports each request once, after its last block has ended.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "active_request.hpp"
#include "descriptor.hpp"
#include "latency.hpp"
#include "request.hpp"

namespace infinity {

struct ReactorStats {
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t num_reads = 0;  // block I/Os that ended, continuations and retries included
  std::uint64_t num_writes = 0;
  std::uint64_t num_short = 0;      // block I/Os that moved less than was asked for
  std::uint64_t num_in_flight = 0;  // requests accepted whose completion has not been reported
};

// What its callers and its thread share (under a mutex), and what only the thread touches. Any
// thread may call the public verbs. See start_reactor for who owns it.
class Reactor {
 public:
  // latencies: where to count those of block I/Os; null: they are not timed.
  Reactor(std::unique_ptr<IoEngine> engine, unsigned queue_depth, std::uint32_t block_bytes,
          std::unique_ptr<Latencies> latencies = nullptr);
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Readable while completions wait, or the engine has broken down. Owned by the reactor.
  int event_fd() const noexcept { return completed_event_.get(); }
  const std::string& engine_name() const noexcept { return engine_name_; }

  int add_file(int fd);
  void remove_file(int index);
  int add_buffer(std::shared_ptr<Region> region);
  void remove_buffer(int index);

  void submit(Request request);
  // std::system_error once nothing is left to reap of an engine that has broken down. Requests that
  // were in flight are never reported then: the kernel may write into their memory at any time.
  std::vector<Completion> reap(std::size_t completions_max);
  ReactorStats stats() const;

  // Refuses new requests; the thread ends when those accepted have.
  void begin_close() noexcept;
  // begin_close, and waits until the thread is gone. False: not in time, or the engine is broken.
  bool close(std::chrono::milliseconds timeout);

  // The body of the I/O thread. False if the engine broke down: then everything must stay as it is
  // until the process ends.
  bool run() noexcept;

 protected:
  mutable std::mutex mutex_;  // guards this group
  std::condition_variable ended_condition_;
  std::deque<ActiveRequest> incoming_;
  std::deque<Completion> completed_;
  ReactorStats stats_;
  const std::unique_ptr<Latencies> latencies_;
  std::size_t num_unreaped_ = 0;
  bool thread_sleeps_ = false;
  bool closing_ = false;
  bool ended_ = false;  // the I/O thread holds nothing any more
  int broken_errno_ = 0;

 private:
  using RequestPosition = std::list<ActiveRequest>::iterator;

  // One of queue_depth cells. Its I/O may take several rounds: a short one goes on from the last
  // page boundary reached, since direct I/O takes no other offsets.
  struct Block {
    RequestPosition request;
    std::size_t index{};  // within the request
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
  std::uint64_t clock_ns() const noexcept;  // 0: nothing is timed
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
  void break_down(int error_number) noexcept;

  const pid_t owner_pid_;  // a forked child has the object but not the thread
  const std::string engine_name_;
  const std::uint32_t block_bytes_;
  const Descriptor completed_event_;

  std::shared_ptr<IoEngine> engine_;  // shared with what is registered with it
  Table<RegisteredFile> files_{"file"};
  Table<RegisteredBuffer> buffers_{"buffer"};

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

// Starts the thread and returns the callers' handle: dropping it closes the reactor, blocks nobody
// and takes nothing away from the thread, which shares ownership of all that its I/O needs (engine,
// duplicated descriptors, regions, eventfds) and frees it when the last I/O has ended.
void run_on_thread(std::shared_ptr<Reactor> reactor);

template <typename R>
std::shared_ptr<R> start_reactor(std::shared_ptr<R> reactor) {
  run_on_thread(reactor);
  R* const target = reactor.get();
  return {target, [owner = std::move(reactor)](R*) { owner->begin_close(); }};
}

}  // namespace infinity

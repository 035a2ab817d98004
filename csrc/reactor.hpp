// The I/O thread: takes requests of any size, keeps queue_depth blocks of them in flight at one
// engine, and reports each request once, after its last block has ended.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "latency.hpp"
#include "region.hpp"

namespace infinity {

inline constexpr unsigned kQueueDepthMax = 4096;
static_assert(kQueueDepthMax <= kWakeToken, "a block's token is its cell");
inline constexpr std::uint32_t kBlockBytesMax = std::uint32_t{1} << 30;

inline constexpr std::size_t kBlocksMax = 65536;  // that one request may name

// Numbered as protocol.Status.
enum class IoStatus : std::uint32_t { kOk = 0, kIoError = 2, kShortIo = 3, kIntegrity = 4 };

// Where one block lies, and which way its bytes go.
struct BlockPlace {
  IoOp op = IoOp::kRead;
  std::uint64_t offset = 0;
  std::uint64_t buffer_offset = 0;
};

struct Request {
  std::uint64_t tag = 0;
  IoOp op = IoOp::kRead;
  int file = -1;    // from add_file
  int buffer = -1;  // from add_buffer
  std::uint64_t offset = 0;
  std::uint64_t buffer_offset = 0;
  std::uint64_t num_bytes = 0;
  std::shared_ptr<Region> checksums;  // one uint32 per block from checksums_offset on; or null
  std::uint64_t checksums_offset = 0;
  bool verify = false;
  // If not empty: the places of single blocks of num_bytes each, at most block_bytes, instead of op
  // and offsets. They have no checksums.
  std::vector<BlockPlace> blocks;
  // Of blocks, instead of their buffer_offset: each goes through a piece of the buffer that belongs
  // to its cell of the queue. There are queue_depth for writes, then as many for reads, so that
  // what is written stays as it was. Any number of blocks needs no more pieces than are in flight.
  // Requests in cells that are in flight together have one num_bytes.
  bool in_cells = false;
  // Of blocks in cells: what is copied over the beginning of every page of its piece just before a
  // block is written. The same number of bytes for each, those that are read included; or empty.
  std::vector<std::byte> headers;
};

// Of a request that went well: its own (first) offset and all its bytes. Of one that failed: of the
// first block, in the order of the request, that did.
struct Completion {
  std::uint64_t tag = 0;
  IoStatus status = IoStatus::kOk;
  int error_number = 0;
  std::uint64_t offset = 0;
  std::uint64_t expected = 0;  // bytes, or the stored checksum
  std::uint64_t actual = 0;    // bytes, or the checksum found
};

struct ReactorStats {
  std::uint64_t bytes_read = 0;
  std::uint64_t bytes_written = 0;
  std::uint64_t num_reads = 0;  // block I/Os that ended, continuations and retries included
  std::uint64_t num_writes = 0;
  std::uint64_t num_short = 0;      // block I/Os that moved less than was asked for
  std::uint64_t num_in_flight = 0;  // requests accepted whose completion has not been reported
};

class ReactorCore;

// Any thread may call any of these. The I/O thread shares ownership of the core (engine, duplicated
// file descriptors, regions, eventfds), so a reactor that is dropped while a device hangs blocks
// nobody: the thread ends by itself when the last I/O has, and frees them then.
class Reactor {
 public:
  Reactor(std::unique_ptr<IoEngine> engine, unsigned queue_depth, std::uint32_t block_bytes);
  ~Reactor();
  Reactor(const Reactor&) = delete;
  Reactor& operator=(const Reactor&) = delete;

  // Readable while completions wait. Owned by the reactor.
  int event_fd() const noexcept;
  std::string engine_name() const;

  int add_file(int fd);
  void remove_file(int index);
  int add_buffer(std::shared_ptr<Region> region);
  void remove_buffer(int index);

  void submit(Request request);
  std::vector<Completion> reap(std::size_t completions_max);
  ReactorStats stats() const;

  // Of block I/Os whose bytes have all moved, continuations included, since the last reset.
  Latencies latencies() const;
  Histogram clat() const;  // reads and writes together: less to copy
  void reset_latencies();

  // Refuses new requests and waits until those accepted have ended and the thread is gone.
  bool close(std::chrono::milliseconds timeout);

 private:
  std::shared_ptr<ReactorCore> core_;
  int owner_pid_;  // a forked child has the object but not the thread
};

}  // namespace infinity

// What is asked of a reactor, and what it answers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine.hpp"
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
  IoOp op{};
  std::uint64_t offset{};
  std::uint64_t buffer_offset{};
};

// What only the bench asks for: single blocks of the request's num_bytes each, at most block_bytes.
struct BenchBlocks {
  std::vector<BlockPlace> places;
  // Instead of their buffer_offset: each goes through a piece of the buffer that belongs to its
  // cell of the queue. There are queue_depth for writes, then as many for reads, so that what is
  // written stays as it was. Any number of blocks needs no more pieces than are in flight. Requests
  // in cells that are in flight together have one num_bytes.
  bool in_cells = false;
  // In cells: what is copied over the beginning of every page of its piece just before a block is
  // written. The same number of bytes for each, those that are read included; or empty.
  std::vector<std::byte> headers;
};

struct Request {
  std::uint64_t tag{};
  IoOp op{};
  int file{};    // from add_file
  int buffer{};  // from add_buffer
  std::uint64_t offset{};
  std::uint64_t buffer_offset{};
  std::uint64_t num_bytes{};
  std::shared_ptr<Region> checksums;  // one uint32 per block from checksums_offset on; or null
  std::uint64_t checksums_offset{};
  bool verify = false;
  std::optional<BenchBlocks> blocks;  // instead of op, offset and buffer_offset; no checksums
};

// Of a request that went well: its own (first) offset and all its bytes. Of one that failed: of the
// first block, in the order of the request, that did.
struct Completion {
  std::uint64_t tag{};
  IoStatus status{};
  int error_number{};
  std::uint64_t offset{};
  std::uint64_t expected{};  // bytes, or the stored checksum
  std::uint64_t actual{};    // bytes, or the checksum found
};

}  // namespace infinity

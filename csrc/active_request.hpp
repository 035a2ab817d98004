// A request that the reactor has accepted: everything it refers to, and the blocks it consists of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "registry.hpp"
#include "request.hpp"

namespace infinity {

// Where one block lies, how much of it there is.
struct BlockExtent {
  BlockPlace place;
  std::uint32_t num_bytes{};
};

struct ActiveRequest {
  // std::invalid_argument unless all of it lies within file, buffer and checksums.
  ActiveRequest(Request resolved, std::shared_ptr<RegisteredFile> its_file,
                std::shared_ptr<RegisteredBuffer> its_buffer, std::uint32_t bytes_per_block,
                std::size_t cells_of_queue);

  // The block to be cut next: computed for a contiguous request, as listed for a scattered one.
  // cell: its place in the queue.
  BlockExtent next_block(std::size_t cell) const;
  // Before the block just cut is written.
  void write_header(const BlockExtent& block) const;
  bool all_cut() const { return num_cut == num_blocks; }
  std::span<std::byte> bytes(const BlockExtent& block) const {
    return {buffer->region().data() + block.place.buffer_offset, block.num_bytes};
  }

  Request request;
  std::shared_ptr<RegisteredFile> file;
  std::shared_ptr<RegisteredBuffer> buffer;
  std::uint32_t block_bytes;
  std::size_t num_cells;               // of the queue: blocks in flight at most
  std::uint32_t* checksums = nullptr;  // one per block; null: none kept
  std::size_t num_blocks{};            // falls to num_cut when a block fails
  std::size_t num_cut = 0;
  std::size_t num_in_flight = 0;
  std::size_t first_failed{};  // which block, once completion.status says that one did
  Completion completion;

 private:
  void resolve_blocks();
  void check_cells() const;
  void resolve_checksums();
};

}  // namespace infinity

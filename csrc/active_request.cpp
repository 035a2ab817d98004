#include "active_request.hpp"

#include <sys/types.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "error.hpp"
#include "wire.hpp"

namespace infinity {
namespace {

void check_place(const BlockPlace& place, std::uint64_t num_bytes, const Region& region) {
  constexpr auto kOffsetMax = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
  require(place.offset <= kOffsetMax && num_bytes <= kOffsetMax - place.offset,
          "offset is beyond what a file can have");
  region.slice(place.buffer_offset, num_bytes);
  require(place.op == IoOp::kWrite || region.writable(),
          "READ into a region that is mapped read-only");
}

}  // namespace

ActiveRequest::ActiveRequest(Request resolved, std::shared_ptr<RegisteredFile> its_file,
                             std::shared_ptr<RegisteredBuffer> its_buffer,
                             std::uint32_t bytes_per_block, std::size_t cells_of_queue)
    : request(std::move(resolved)),
      file(std::move(its_file)),
      buffer(std::move(its_buffer)),
      block_bytes(bytes_per_block),
      num_cells(cells_of_queue) {
  completion = {request.tag,    IoStatus::kOk,     0,
                request.offset, request.num_bytes, request.num_bytes};
  resolve_blocks();
  resolve_checksums();
}

void ActiveRequest::resolve_blocks() {
  require(request.num_bytes > 0, "num_bytes is 0");
  const Region& region = buffer->region();
  if (!request.blocks) {
    check_place({request.op, request.offset, request.buffer_offset}, request.num_bytes, region);
    num_blocks = (request.num_bytes - 1) / block_bytes + 1;
    return;
  }
  const BenchBlocks& blocks = *request.blocks;
  num_blocks = blocks.places.size();
  require(num_blocks <= kBlocksMax, "more than 65536 blocks");
  require(request.num_bytes <= block_bytes, "num_bytes of a block is more than block_bytes");
  require(request.checksums == nullptr, "blocks that are named singly have no checksums");
  for (const BlockPlace& place : blocks.places) {
    check_place(place, request.num_bytes, region);
  }
  require(blocks.in_cells || blocks.headers.empty(), "headers are for blocks in cells");
  if (blocks.in_cells) check_cells();
  completion.offset = blocks.places.front().offset;
  completion.expected = completion.actual = num_blocks * request.num_bytes;
}

void ActiveRequest::check_cells() const {
  const Region& region = buffer->region();
  region.slice(0, 2 * num_cells * request.num_bytes);
  const std::size_t header_bytes = request.blocks->headers.size();
  if (header_bytes == 0) return;
  require(header_bytes % num_blocks == 0 && header_bytes / num_blocks <= wire::kPage,
          "headers are not of one length for each block, at most a page");
  require(region.writable(), "headers for a region that is mapped read-only");
}

void ActiveRequest::resolve_checksums() {
  require(!request.verify || (request.op == IoOp::kRead && request.checksums != nullptr),
          "verify is for READ, and needs checksums");
  if (request.checksums == nullptr) return;
  require(request.op == IoOp::kRead || request.checksums->writable(),
          "WRITE stores checksums, but their region is mapped read-only");
  require(request.checksums_offset % sizeof(std::uint32_t) == 0,
          "checksums_offset is not a multiple of 4");
  const auto bytes =
      request.checksums->slice(request.checksums_offset, num_blocks * sizeof(std::uint32_t));
  checksums = reinterpret_cast<std::uint32_t*>(bytes.data());
}

BlockExtent ActiveRequest::next_block(std::size_t cell) const {
  if (request.blocks) {
    BlockPlace place = request.blocks->places[num_cut];
    if (request.blocks->in_cells) {
      const std::size_t piece = place.op == IoOp::kRead ? num_cells + cell : cell;
      place.buffer_offset = piece * request.num_bytes;
    }
    return {place, static_cast<std::uint32_t>(request.num_bytes)};
  }
  const std::uint64_t begin = num_cut * std::uint64_t{block_bytes};
  return {
      {request.op, request.offset + begin, request.buffer_offset + begin},
      static_cast<std::uint32_t>(std::min<std::uint64_t>(block_bytes, request.num_bytes - begin))};
}

void ActiveRequest::write_header(const BlockExtent& block) const {
  if (!request.blocks || request.blocks->headers.empty()) return;
  const auto& headers = request.blocks->headers;
  const std::size_t header_bytes = headers.size() / request.blocks->places.size();
  const std::byte* const header = headers.data() + num_cut * header_bytes;
  const auto piece = bytes(block);
  for (std::size_t page = 0; page < piece.size(); page += wire::kPage) {
    std::memcpy(piece.data() + page, header, std::min(header_bytes, piece.size() - page));
  }
}

}  // namespace infinity

// A shared mapping of a memfd or any other mappable file.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>

namespace infinity {

// Owns the mapping, not the descriptor it was made from. Held by shared_ptr: rings, reactors and
// array views keep it mapped; the last of them unmaps it.
class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(int fd, std::size_t region_bytes, bool writable);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t region_bytes() const noexcept { return region_bytes_; }
  bool writable() const noexcept { return writable_; }

  // The bytes [offset, offset + num_bytes), or std::invalid_argument.
  std::span<std::byte> slice(std::size_t offset, std::size_t num_bytes) const;

  // Allocates every page. Returns how many bytes were put into huge pages: all but an odd end,
  // where the kernel has them to give.
  std::size_t prefault(unsigned num_threads) const;
  void lock() const;
  // Children that are forked from now on have no such mapping.
  void dont_fork();
  void zero(std::size_t offset, std::size_t num_bytes) const;

 private:
  std::byte* data_ = nullptr;
  std::size_t region_bytes_;
  bool writable_;
  pid_t only_in_ = 0;  // the process that has the mapping, if its children do not
};

}  // namespace infinity

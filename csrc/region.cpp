#include "region.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "error.hpp"
#include "wire.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

namespace infinity {
namespace {

// Touches one byte a page without changing it, for kernels without MADV_POPULATE (before 5.14).
void touch_pages(std::span<std::byte> bytes, bool writable) noexcept {
  for (std::size_t at = 0; at < bytes.size(); at += wire::kPage) {
    auto& cell = *reinterpret_cast<std::uint8_t*>(bytes.data() + at);
    if (writable) {
      std::atomic_ref(cell).fetch_or(0);
    } else {
      static_cast<void>(*static_cast<volatile std::uint8_t*>(&cell));
    }
  }
}

// Returns 0 or an errno.
int populate(std::span<std::byte> bytes, bool writable) noexcept {
  const int advice = writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
  while (::madvise(bytes.data(), bytes.size(), advice) < 0) {
    if (errno == EINVAL) {
      touch_pages(bytes, writable);
      return 0;
    }
    if (errno != EINTR && errno != EAGAIN) return errno;
  }
  return 0;
}

}  // namespace

Region::Region(int fd, std::size_t region_bytes, bool writable)
    : region_bytes_(region_bytes), writable_(writable) {
  require(region_bytes > 0, "a region needs at least one byte");
  struct stat status{};
  if (::fstat(fd, &status) < 0) throw_last_errno("fstat");
  // Touching a mapping beyond the end of its file is a SIGBUS, not an error code.
  if (S_ISREG(status.st_mode) && static_cast<std::size_t>(status.st_size) < region_bytes) {
    throw_errno(EINVAL, "the file holds " + std::to_string(status.st_size) + " bytes, the region " +
                            std::to_string(region_bytes));
  }
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* mapped = ::mmap(nullptr, region_bytes, protection, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) throw_last_errno("mmap");
  data_ = static_cast<std::byte*>(mapped);
}

Region::~Region() { ::munmap(data_, region_bytes_); }

std::span<std::byte> Region::slice(std::size_t offset, std::size_t num_bytes) const {
  if (offset > region_bytes_ || num_bytes > region_bytes_ - offset) {
    throw std::invalid_argument(std::to_string(num_bytes) + " bytes at " + std::to_string(offset) +
                                " do not lie in a region of " + std::to_string(region_bytes_));
  }
  return {data_ + offset, num_bytes};
}

void Region::prefault(unsigned num_threads) const {
  require(num_threads > 0, "prefault needs at least one thread");
  const std::size_t num_pages = (region_bytes_ + wire::kPage - 1) / wire::kPage;
  const std::size_t num_slices = std::min<std::size_t>(num_threads, num_pages);
  std::atomic<int> error_number = 0;
  const auto run = [&](std::size_t slice_index) noexcept {
    const std::size_t begin = num_pages * slice_index / num_slices * wire::kPage;
    const std::size_t end =
        std::min(num_pages * (slice_index + 1) / num_slices * wire::kPage, region_bytes_);
    if (const int error = populate({data_ + begin, end - begin}, writable_)) error_number = error;
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(num_slices);
    for (std::size_t i = 1; i < num_slices; ++i) threads.emplace_back(run, i);
    run(0);
  }
  if (error_number != 0) throw_errno(error_number, "prefault");
}

void Region::lock() const {
  if (::mlock(data_, region_bytes_) < 0) throw_last_errno("mlock");
}

void Region::dont_fork() const {
  if (::madvise(data_, region_bytes_, MADV_DONTFORK) < 0) throw_last_errno("MADV_DONTFORK");
}

bool Region::advise_huge() const noexcept {
  return ::madvise(data_, region_bytes_, MADV_HUGEPAGE) == 0;
}

void Region::zero(std::size_t offset, std::size_t num_bytes) const {
  require(writable_, "the region is mapped read-only");
  const auto bytes = slice(offset, num_bytes);
  std::memset(bytes.data(), 0, bytes.size());
}

}  // namespace infinity

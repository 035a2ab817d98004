#include "region.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace infinity {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kCollapsedAtOnce = 16 * kHugePage;  // each time all cores are interrupted
constexpr auto kCollapseTimeMax = std::chrono::seconds(30);

// Maps the file where a huge page can begin, if it is large enough for one: the kernel puts a huge
// page of the file behind one entry of the page table only where both are aligned, and by itself
// it aligns no mapping that is advised to have them later.
void* map_aligned(int fd, std::size_t num_bytes, int protection) {
  if (num_bytes < kHugePage) return ::mmap(nullptr, num_bytes, protection, MAP_SHARED, fd, 0);
  void* reserved = ::mmap(nullptr, num_bytes + kHugePage, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  auto* const begin = static_cast<std::byte*>(reserved);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(begin) % kHugePage;
  void* mapped = ::mmap(begin + head, num_bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error_number = errno;
    ::munmap(begin, num_bytes + kHugePage);
    errno = error_number;
    return MAP_FAILED;
  }
  const std::size_t end = (head + num_bytes + wire::kPage - 1) / wire::kPage * wire::kPage;
  if (head > 0) ::munmap(begin, head);
  if (end < num_bytes + kHugePage) ::munmap(begin + end, num_bytes + kHugePage - end);
  return mapped;
}

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

int collapse(std::span<std::byte> pieces) noexcept {
  while (::madvise(pieces.data(), pieces.size(), MADV_COLLAPSE) < 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

// Lets the kernel make huge pages of a part (MADV_COLLAPSE, Linux 6.1): asked for so it heeds no
// setting of transparent huge pages, which for shared memory is "never" nearly everywhere. It wants
// one page of each to begin with. Returns how many bytes became such; has_huge is false if asking
// for more makes no sense.
std::size_t populate_huge(std::span<std::byte> part, bool& has_huge) noexcept {
  const auto pieces = part.first(part.size() / kHugePage * kHugePage);
  for (std::size_t at = 0; at < pieces.size(); at += kHugePage) {
    if (populate(pieces.subspan(at, wire::kPage), true) != 0) return 0;  // which is said later
  }
  if (pieces.empty() || collapse(pieces) == 0) return pieces.size();
  std::size_t huge_bytes = 0;
  for (std::size_t at = 0; at < pieces.size() && has_huge; at += kHugePage) {
    const int error_number = collapse(pieces.subspan(at, kHugePage));
    if (error_number == 0) huge_bytes += kHugePage;
    has_huge = error_number != ENOMEM && error_number != EINVAL;  // none left, none at all
  }
  return huge_bytes;
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
  void* mapped = map_aligned(fd, region_bytes, protection);
  if (mapped == MAP_FAILED) throw_last_errno("mmap");
  data_ = static_cast<std::byte*>(mapped);
}

// A forked child that was left without the mapping may have another one there by now.
Region::~Region() {
  if (only_in_ == 0 || only_in_ == ::getpid()) ::munmap(data_, region_bytes_);
}

std::span<std::byte> Region::slice(std::size_t offset, std::size_t num_bytes) const {
  if (offset > region_bytes_ || num_bytes > region_bytes_ - offset) {
    throw std::invalid_argument(std::to_string(num_bytes) + " bytes at " + std::to_string(offset) +
                                " do not lie in a region of " + std::to_string(region_bytes_));
  }
  return {data_ + offset, num_bytes};
}

std::size_t Region::prefault(unsigned num_threads) const {
  require(num_threads > 0, "prefault needs at least one thread");
  // Older kernels heed this if their settings allow it.
  ::madvise(data_, region_bytes_, MADV_HUGEPAGE);
  const std::size_t num_parts = (region_bytes_ + kCollapsedAtOnce - 1) / kCollapsedAtOnce;
  const std::size_t num_slices = std::min<std::size_t>(num_threads, num_parts);
  const auto deadline = std::chrono::steady_clock::now() + kCollapseTimeMax;
  std::atomic<int> error_number = 0;
  std::atomic<std::size_t> huge_bytes = 0;
  const auto run = [&](std::size_t slice_index) noexcept {
    bool has_huge = writable_;
    const std::size_t end = num_parts * (slice_index + 1) / num_slices;
    for (std::size_t i = num_parts * slice_index / num_slices; i < end; ++i) {
      const std::size_t begin = i * kCollapsedAtOnce;
      const std::span part{data_ + begin, std::min(kCollapsedAtOnce, region_bytes_ - begin)};
      has_huge = has_huge && std::chrono::steady_clock::now() < deadline;
      if (has_huge) huge_bytes += populate_huge(part, has_huge);
      if (const int error = populate(part, writable_)) error_number = error;
    }
  };
  {
    std::vector<std::jthread> threads;
    threads.reserve(num_slices);
    for (std::size_t i = 1; i < num_slices; ++i) threads.emplace_back(run, i);
    run(0);
  }
  if (error_number != 0) throw_errno(error_number, "prefault");
  return huge_bytes;
}

void Region::lock() const {
  if (::mlock(data_, region_bytes_) < 0) throw_last_errno("mlock");
}

void Region::dont_fork() {
  if (::madvise(data_, region_bytes_, MADV_DONTFORK) < 0) throw_last_errno("MADV_DONTFORK");
  only_in_ = ::getpid();
}

void Region::zero(std::size_t offset, std::size_t num_bytes) const {
  require(writable_, "the region is mapped read-only");
  const auto bytes = slice(offset, num_bytes);
  std::memset(bytes.data(), 0, bytes.size());
}

}  // namespace infinity

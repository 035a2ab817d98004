#include "ring.hpp"

#include <poll.h>

#include <algorithm>
#include <bit>
#include <chrono>

#include "error.hpp"

namespace infinity {
namespace {

constexpr std::size_t kEntriesMax = std::size_t{1} << 20;

using Clock = std::chrono::steady_clock;

int remaining_ms(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::max<long>(left, 0));
}

}  // namespace

RingBase::RingBase(std::shared_ptr<Region> region, std::size_t offset, std::size_t num_entries,
                   std::size_t entry_bytes, int wake_fd, RingOrigin origin)
    : region_(std::move(region)), num_entries_(num_entries), wake_(wake_fd) {
  require(std::has_single_bit(num_entries) && num_entries <= kEntriesMax,
          "num_entries is not a power of two up to 2**20");
  require(offset % wire::kCacheLine == 0, "a ring starts at a multiple of 64");
  require(region_->writable(), "a ring needs a writable region");
  const auto bytes = region_->slice(offset, sizeof(wire::RingHeader) + num_entries * entry_bytes);
  header_ = reinterpret_cast<wire::RingHeader*>(bytes.data());
  if (origin == RingOrigin::kCreate) format(entry_bytes);
  verify(entry_bytes);
  seen_head_ = head_ = load_acquire(header_->head);
  seen_tail_ = tail_ = load_acquire(header_->tail);
  validated_distance(tail_, head_);
}

void RingBase::format(std::size_t entry_bytes) noexcept {
  *header_ = wire::RingHeader{};
  header_->version = wire::kProtocolVersion;
  header_->num_entries = static_cast<std::uint32_t>(num_entries_);
  header_->entry_bytes = static_cast<std::uint32_t>(entry_bytes);
  store_release(header_->magic, wire::kRingMagic);
}

void RingBase::verify(std::size_t entry_bytes) const {
  require(load_acquire(header_->magic) == wire::kRingMagic, "no ring lies here (magic)");
  require(header_->version == wire::kProtocolVersion, "the ring has another protocol version");
  require(header_->num_entries == num_entries_, "the ring has another number of entries");
  require(header_->entry_bytes == entry_bytes, "the ring has entries of another size");
}

std::uint64_t RingBase::validated_distance(std::uint64_t tail, std::uint64_t head) const {
  const std::uint64_t distance = tail - head;
  if (distance > num_entries_) {
    throw std::invalid_argument("ring indexes are corrupt: tail " + std::to_string(tail) +
                                ", head " + std::to_string(head) + ", " +
                                std::to_string(num_entries_) + " entries");
  }
  return distance;
}

std::size_t RingBase::num_to_pop(std::size_t num_wanted) {
  if (seen_tail_ - head_ < num_wanted) {
    const std::uint64_t tail = load_acquire(header_->tail);
    validated_distance(tail, head_);
    seen_tail_ = tail;
  }
  return seen_tail_ - head_;
}

std::size_t RingBase::num_free(std::size_t num_wanted) {
  if (num_entries_ - (tail_ - seen_head_) < num_wanted) {
    const std::uint64_t head = load_acquire(header_->head);
    validated_distance(tail_, head);
    seen_head_ = head;
  }
  return num_entries_ - (tail_ - seen_head_);
}

std::size_t RingBase::num_ready() const {
  // A head that has not moved between two loads belongs to the tail loaded in between; the side
  // that moves it is at most one pass ahead, so a few tries are enough unless the indexes are
  // garbage.
  constexpr int kTries = 64;
  std::uint64_t head = load_acquire(header_->head);
  for (int i = 0; i < kTries; ++i) {
    const std::uint64_t tail = load_acquire(header_->tail);
    if (const auto again = load_acquire(header_->head); again != head) {
      head = again;
      continue;
    }
    return validated_distance(tail, head);
  }
  return num_entries_;
}

void RingBase::wake_consumer() {
  if (exchange_seq_cst<std::uint32_t>(header_->consumer_sleeps, 0) != 0) wake_.signal();
}

bool RingBase::prepare_sleep() {
  exchange_seq_cst<std::uint32_t>(header_->consumer_sleeps, 1);
  if (num_to_pop() == 0) return true;
  exchange_seq_cst<std::uint32_t>(header_->consumer_sleeps, 0);
  return false;
}

WaitResult RingBase::wait(int timeout_ms, int other_fd) {
  require(timeout_ms >= 0, "every wait has a deadline: timeout_ms is negative");
  const auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  if (num_to_pop() > 0) return WaitResult::kReady;
  while (prepare_sleep()) {
    pollfd fds[2] = {{wake_.fd(), POLLIN, 0}, {other_fd, POLLIN, 0}};
    const int num_fds = ::poll(fds, 2, remaining_ms(deadline));
    if (num_fds < 0 && errno != EINTR) throw_last_errno("poll");
    const bool interrupted = num_fds < 0;
    if (!interrupted && fds[0].revents != 0) wake_.drain();
    if (num_to_pop() > 0) break;
    if (interrupted) return WaitResult::kInterrupted;
    if (fds[1].revents != 0) return WaitResult::kOtherFd;
    if (Clock::now() >= deadline) return WaitResult::kTimedOut;
  }
  exchange_seq_cst<std::uint32_t>(header_->consumer_sleeps, 0);
  return WaitResult::kReady;
}

}  // namespace infinity

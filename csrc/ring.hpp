// SPSC rings in shared memory: a RingHeader followed by num_entries entries.
//
// The producer owns the tail, the consumer the head. Each side keeps its own index privately and
// only ever publishes it: what the other process writes there cannot move it. The other side's
// index is validated each time it is loaded, an entry is copied once and never looked at again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "atomics.hpp"
#include "region.hpp"
#include "wake_socket.hpp"
#include "wire.hpp"

namespace infinity {

enum class RingOrigin { kCreate, kAttach };

// Interrupted: a signal came; the caller runs its handlers and waits again.
enum class WaitResult { kReady = 0, kTimedOut = 1, kOtherFd = 2, kInterrupted = 3 };

// The half of a ring that does not depend on the type of its entries. Holds the region and a
// duplicate of this side's wake socket.
class RingBase {
 public:
  RingBase(const RingBase&) = delete;
  RingBase& operator=(const RingBase&) = delete;

  // Consumer: raises the sleep flag. True if the ring is still empty, so that the caller may sleep
  // on the wake socket; false (flag lowered) if there is something to pop.
  bool prepare_sleep();

  // Consumer: sleeps until an entry is there, other_fd (-1: none) is readable or hung up, or
  // timeout_ms has passed.
  WaitResult wait(int timeout_ms, int other_fd);

  // Entries in the ring, as a snapshot.
  std::size_t num_ready() const;

  std::size_t num_entries() const noexcept { return num_entries_; }

 protected:
  RingBase(std::shared_ptr<Region> region, std::size_t offset, std::size_t num_entries,
           std::size_t entry_bytes, int wake_fd, RingOrigin origin);
  ~RingBase() = default;

  // Entries ready for this consumer, loading the tail only if fewer than wanted are known of.
  std::size_t num_to_pop(std::size_t num_wanted = 1);
  // Free entries for this producer, loading the head only if fewer than wanted are known of.
  std::size_t num_free(std::size_t num_wanted);
  // Producer: wakes the consumer if its sleep flag was raised.
  void wake_consumer();

  void advance_tail(std::size_t num_pushed) noexcept {
    store_release(header_->tail, tail_ += num_pushed);
  }
  void advance_head(std::size_t num_popped) noexcept {
    store_release(header_->head, head_ += num_popped);
  }

  std::shared_ptr<Region> region_;
  wire::RingHeader* header_;
  std::size_t num_entries_;
  std::uint64_t tail_;       // producer's, the truth
  std::uint64_t head_;       // consumer's, the truth
  std::uint64_t seen_tail_;  // consumer's last validated view of the other side
  std::uint64_t seen_head_;  // producer's
  std::mutex producer_mutex_;

 private:
  void format(std::size_t entry_bytes) noexcept;
  void verify(std::size_t entry_bytes) const;
  std::uint64_t validated_distance(std::uint64_t tail, std::uint64_t head) const;

  WakeSocket wake_;
};

template <typename Entry>
class Ring : public RingBase {
 public:
  Ring(std::shared_ptr<Region> region, std::size_t offset, std::size_t num_entries, int wake_fd,
       RingOrigin origin)
      : RingBase(std::move(region), offset, num_entries, sizeof(Entry), wake_fd, origin),
        entries_(reinterpret_cast<Entry*>(header_ + 1)) {}

  static std::size_t bytes_required(std::size_t num_entries) noexcept {
    return sizeof(wire::RingHeader) + num_entries * sizeof(Entry);
  }

  // All of the batch or, if there is no room for all of it, nothing. Any thread.
  bool push(std::span<const Entry> batch) {
    {
      const std::lock_guard lock(producer_mutex_);
      if (num_free(batch.size()) < batch.size()) return false;
      for (std::size_t i = 0; i < batch.size(); ++i) {
        publish_once(entries_[(tail_ + i) & (num_entries_ - 1)], batch[i]);
      }
      advance_tail(batch.size());
    }
    wake_consumer();
    return true;
  }

  std::optional<Entry> pop() {
    if (num_to_pop() == 0) return std::nullopt;
    const Entry entry = copy_once(entries_[head_ & (num_entries_ - 1)]);
    advance_head(1);
    return entry;
  }

  std::vector<Entry> pop_batch(std::size_t entries_max) {
    const std::size_t num_popped = std::min(num_to_pop(entries_max), entries_max);
    std::vector<Entry> batch;
    batch.reserve(num_popped);
    for (std::size_t i = 0; i < num_popped; ++i) {
      batch.push_back(copy_once(entries_[(head_ + i) & (num_entries_ - 1)]));
    }
    advance_head(num_popped);
    return batch;
  }

 private:
  Entry* entries_;
};

using SubmissionRing = Ring<wire::Sqe>;
using CompletionRing = Ring<wire::Cqe>;

}  // namespace infinity

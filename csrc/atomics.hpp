// Every access to memory that another thread or process changes at the same time goes through
// these five functions; no other file names a memory order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace infinity {

// Pairs with store_release: what was written before the store is visible after the load.
template <typename T>
T load_acquire(const T& location) noexcept {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  return std::atomic_ref<T>(const_cast<T&>(location)).load(std::memory_order_acquire);
}

template <typename T>
void store_release(T& location, T value) noexcept {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  std::atomic_ref<T>(location).store(value, std::memory_order_release);
}

// For the sleep flag. Both sides exchange it, so the two exchanges are ordered: either the producer
// finds the flag raised, or the consumer's exchange follows it and then sees the producer's tail.
// A plain store of the one and load of the other may pass each other and lose the wake-up.
template <typename T>
T exchange_seq_cst(T& location, T value) noexcept {
  static_assert(std::atomic_ref<T>::is_always_lock_free);
  return std::atomic_ref<T>(location).exchange(value, std::memory_order_seq_cst);
}

// Reads and writes each word of an entry exactly once, whatever the other process does to it
// meanwhile: a validated copy cannot change afterwards. Ordering comes from the index.
template <typename Entry>
Entry copy_once(const Entry& shared) noexcept {
  static_assert(std::is_trivially_copyable_v<Entry> && sizeof(Entry) % sizeof(std::uint64_t) == 0);
  Entry local;
  auto* source = reinterpret_cast<std::uint64_t*>(const_cast<Entry*>(&shared));
  auto* target = reinterpret_cast<unsigned char*>(&local);
  for (std::size_t i = 0; i < sizeof(Entry) / sizeof(std::uint64_t); ++i) {
    const std::uint64_t word = std::atomic_ref(source[i]).load(std::memory_order_relaxed);
    __builtin_memcpy(target + i * sizeof(word), &word, sizeof(word));
  }
  return local;
}

template <typename Entry>
void publish_once(Entry& shared, const Entry& local) noexcept {
  static_assert(std::is_trivially_copyable_v<Entry> && sizeof(Entry) % sizeof(std::uint64_t) == 0);
  auto* target = reinterpret_cast<std::uint64_t*>(&shared);
  const auto* source = reinterpret_cast<const unsigned char*>(&local);
  for (std::size_t i = 0; i < sizeof(Entry) / sizeof(std::uint64_t); ++i) {
    std::uint64_t word;
    __builtin_memcpy(&word, source + i * sizeof(word), sizeof(word));
    std::atomic_ref(target[i]).store(word, std::memory_order_relaxed);
  }
}

}  // namespace infinity

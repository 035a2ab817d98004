#include "registry.hpp"

#include <algorithm>
#include <utility>

#include "error.hpp"

namespace infinity {

RegisteredFile::RegisteredFile(std::shared_ptr<IoEngine> engine, int fd)
    : engine_(std::move(engine)),
      descriptor_(Descriptor::duplicate(fd)),
      slot_(engine_->register_file(descriptor_.get())) {}

RegisteredFile::~RegisteredFile() {
  if (slot_ != kNotRegistered) engine_->unregister_file(slot_);
}

RegisteredBuffer::RegisteredBuffer(std::shared_ptr<IoEngine> engine, std::shared_ptr<Region> region)
    : engine_(std::move(engine)), region_(std::move(region)) {
  const std::size_t bytes = region_->region_bytes();
  for (std::size_t at = 0; at < bytes; at += kRegisteredBytesMax) {
    const auto piece = region_->slice(at, std::min(bytes - at, kRegisteredBytesMax));
    // The kernel pins registered pages for writing, which a read-only mapping does not allow.
    slots_.push_back(region_->writable() ? engine_->register_buffer(piece) : kNotRegistered);
  }
}

RegisteredBuffer::~RegisteredBuffer() {
  for (const int slot : slots_) {
    if (slot != kNotRegistered) engine_->unregister_buffer(slot);
  }
}

int RegisteredBuffer::slot(std::size_t offset, std::size_t num_bytes) const noexcept {
  const std::size_t piece = offset / kRegisteredBytesMax;
  const std::size_t last = (offset + num_bytes - 1) / kRegisteredBytesMax;
  return piece == last ? slots_[piece] : kNotRegistered;
}

template <typename T>
std::size_t Table<T>::position(int index) const {
  const auto position = static_cast<std::size_t>(index);
  if (index < 0 || position >= entries_.size() || entries_[position] == nullptr) {
    throw std::invalid_argument("there is no " + noun_ + " " + std::to_string(index));
  }
  return position;
}

template <typename T>
int Table<T>::add(std::shared_ptr<T> entry) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw std::runtime_error("the reactor is closed");
  auto free = std::find(entries_.begin(), entries_.end(), nullptr);
  if (free == entries_.end()) free = entries_.emplace(free);
  *free = std::move(entry);
  return static_cast<int>(free - entries_.begin());
}

template <typename T>
std::shared_ptr<T> Table<T>::find(int index) const {
  const std::lock_guard lock(mutex_);
  return entries_[position(index)];
}

template <typename T>
void Table<T>::remove(int index) {
  std::shared_ptr<T> removed;  // dies, and unregisters, after the lock is gone
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  auto& entry = entries_[position(index)];
  // New holders come from this table alone, under this lock: the count can only fall.
  if (const auto num_holders = entry.use_count() - 1; num_holders > 0) {
    throw std::runtime_error(noun_ + " " + std::to_string(index) + " is in use by " +
                             std::to_string(num_holders) + " requests");
  }
  removed = std::move(entry);
}

template <typename T>
void Table<T>::close() noexcept {
  std::vector<std::shared_ptr<T>> dropped;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  dropped.swap(entries_);
}

template class Table<RegisteredFile>;
template class Table<RegisteredBuffer>;

}  // namespace infinity

// The files and buffers that requests refer to by index, registered with the engine where it can.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "descriptor.hpp"
#include "engine.hpp"
#include "region.hpp"

namespace infinity {

// Owns a duplicate of the caller's descriptor, so that neither closing nor reusing the caller's
// redirects an I/O; it shares the open file description and with it any flock.
class RegisteredFile {
 public:
  RegisteredFile(std::shared_ptr<IoEngine> engine, int fd);
  ~RegisteredFile();
  RegisteredFile(const RegisteredFile&) = delete;
  RegisteredFile& operator=(const RegisteredFile&) = delete;

  int fd() const noexcept { return descriptor_.get(); }
  int slot() const noexcept { return slot_; }

 private:
  std::shared_ptr<IoEngine> engine_;
  Descriptor descriptor_;
  int slot_;
};

// Keeps the region mapped; registers it in pieces of kRegisteredBytesMax.
class RegisteredBuffer {
 public:
  RegisteredBuffer(std::shared_ptr<IoEngine> engine, std::shared_ptr<Region> region);
  ~RegisteredBuffer();
  RegisteredBuffer(const RegisteredBuffer&) = delete;
  RegisteredBuffer& operator=(const RegisteredBuffer&) = delete;

  const Region& region() const noexcept { return *region_; }

  // The slot that covers these bytes; kNotRegistered if none does or they lie across two.
  int slot(std::size_t offset, std::size_t num_bytes) const noexcept;

 private:
  std::shared_ptr<IoEngine> engine_;
  std::shared_ptr<Region> region_;
  std::vector<int> slots_;  // one per piece
};

// Entries by index. A request in progress holds what it uses; what somebody else holds is not
// removed. Any thread.
template <typename T>
class Table {
 public:
  explicit Table(const char* noun) : noun_(noun) {}

  // At the lowest free index. std::runtime_error once the table is closed.
  int add(std::shared_ptr<T> entry);
  // std::invalid_argument if there is no such entry.
  std::shared_ptr<T> find(int index) const;
  // std::runtime_error if a request still holds the entry; does nothing once the table is closed.
  void remove(int index);
  // Drops all entries for good.
  void close() noexcept;

 private:
  std::size_t position(int index) const;

  const std::string noun_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<T>> entries_;
  bool closed_ = false;
};

extern template class Table<RegisteredFile>;
extern template class Table<RegisteredBuffer>;

}  // namespace infinity

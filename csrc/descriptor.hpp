// A file descriptor with one owner, and the eventfd verbs used throughout the core.
#pragma once

#include <utility>

namespace infinity {

// Owns its descriptor: closes it exactly once.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  int get() const noexcept { return fd_; }

  // A second descriptor of the same open file description, closed on exec.
  static Descriptor duplicate(int fd);
  // A new non-blocking eventfd.
  static Descriptor event();

 private:
  int fd_ = -1;
};

// Makes the eventfd readable. Never blocks: no other process has it, so it stays non-blocking.
void signal_event(int event_fd);

// Makes the eventfd unreadable. Never blocks.
void drain_event(int event_fd);

// Blocks until the eventfd is readable and drains it, or until timeout_ms have passed (negative:
// never) or a signal came.
void await_event(int event_fd, int timeout_ms);

}  // namespace infinity

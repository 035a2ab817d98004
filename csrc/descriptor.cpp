#include "descriptor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "error.hpp"

namespace infinity {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Descriptor Descriptor::duplicate(int fd) {
  const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (copy < 0) throw_last_errno("duplicate descriptor " + std::to_string(fd));
  return Descriptor(copy);
}

Descriptor Descriptor::event() {
  const int fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) throw_last_errno("eventfd");
  return Descriptor(fd);
}

void signal_event(int event_fd) {
  const std::uint64_t one = 1;
  while (::write(event_fd, &one, sizeof(one)) < 0) {
    if (errno == EAGAIN) return;  // the counter is full, so it is readable
    if (errno != EINTR) throw_last_errno("signal eventfd");
  }
}

void drain_event(int event_fd) {
  std::uint64_t count = 0;
  while (::read(event_fd, &count, sizeof(count)) < 0) {
    if (errno == EAGAIN) return;
    if (errno != EINTR) throw_last_errno("drain eventfd");
  }
}

void await_event(int event_fd, int timeout_ms) {
  pollfd ready{event_fd, POLLIN, 0};
  const int num_fds = ::poll(&ready, 1, timeout_ms);
  if (num_fds < 0 && errno != EINTR) throw_last_errno("poll");
  if (num_fds > 0) drain_event(event_fd);
}

}  // namespace infinity

#include "descriptor.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
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
  pollfd state{event_fd, POLLIN, 0};
  if (::poll(&state, 1, 0) > 0 && (state.revents & POLLIN) != 0) return;
  const std::uint64_t one = 1;
  while (::write(event_fd, &one, sizeof(one)) < 0) {
    if (errno == EAGAIN) return;  // the counter is full, so it is readable
    if (errno != EINTR) throw_last_errno("signal eventfd");
  }
}

void drain_event(int event_fd) {
  std::uint64_t count = 0;
  iovec target{&count, sizeof(count)};
  // RWF_NOWAIT, because O_NONBLOCK is a property that the other process can clear.
  while (::preadv2(event_fd, &target, 1, -1, RWF_NOWAIT) < 0) {
    if (errno == EAGAIN) return;
    if (errno == EOPNOTSUPP) {  // kernels before 5.8
      pollfd state{event_fd, POLLIN, 0};
      if (::poll(&state, 1, 0) <= 0) return;
      if (::read(event_fd, &count, sizeof(count)) >= 0 || errno == EAGAIN) return;
    }
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

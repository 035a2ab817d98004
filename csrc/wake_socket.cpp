#include "wake_socket.hpp"

#include <sys/socket.h>

#include "error.hpp"

namespace infinity {

WakeSocket::WakeSocket(int fd) : socket_(Descriptor::duplicate(fd)) {
  int type = 0;
  socklen_t type_bytes = sizeof(type);
  const bool is_socket = ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_bytes) == 0;
  require(is_socket && type == SOCK_DGRAM, "a ring's wake-ups go through a datagram socket");
}

std::pair<Descriptor, Descriptor> WakeSocket::make_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) < 0) {
    throw_last_errno("socketpair");
  }
  return {Descriptor(fds[0]), Descriptor(fds[1])};
}

void WakeSocket::signal() const {
  const char wake = 1;
  // MSG_DONTWAIT, whatever flags the description has
  while (::send(fd(), &wake, sizeof(wake), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN:  // its queue is full, so it is readable
      case ECONNREFUSED:
      case ECONNRESET:
      case ENOTCONN:
      case EPIPE:  // nobody is left to be woken: whoever cares watches the process
        return;
      default:
        throw_last_errno("wake the other side of a ring");
    }
  }
}

void WakeSocket::drain() const {
  char wake = 0;
  while (::recv(fd(), &wake, sizeof(wake), MSG_DONTWAIT) < 0) {
    if (errno == EAGAIN || errno == ECONNRESET) return;
    if (errno != EINTR) throw_last_errno("take a wake-up");
  }
}

}  // namespace infinity

// What the two processes of a ring wake each other through: the ends of a pair of Unix datagram
// sockets. Each process has an end, and so an open file description, of its own; what the other
// does to its end (a flag, a full queue, closing it) neither blocks this one nor makes it busy. An
// eventfd is one description and one counter for both: a write to it can block at any moment.
#pragma once

#include <utility>

#include "descriptor.hpp"

namespace infinity {

class WakeSocket {
 public:
  // Duplicates fd. std::invalid_argument unless it is a datagram socket.
  explicit WakeSocket(int fd);

  static std::pair<Descriptor, Descriptor> make_pair();

  int fd() const noexcept { return socket_.get(); }

  // Makes the other end readable. Never blocks; does nothing if the other end is gone.
  void signal() const;
  // Takes one wake-up, if there is any. Never blocks.
  void drain() const;

 private:
  Descriptor socket_;
};

}  // namespace infinity

#include "file_space.hpp"

#include <fcntl.h>

#include "error.hpp"

namespace infinity {

void allocate(int fd, std::uint64_t offset, std::uint64_t num_bytes) {
  while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(num_bytes)) < 0) {
    if (errno != EINTR) throw_last_errno("fallocate");
  }
}

}  // namespace infinity

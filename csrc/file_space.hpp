// Space on the disk, reserved ahead.
#pragma once

#include <cstdint>

namespace infinity {

// fallocate(2) and nothing else: where the filesystem has none, std::system_error with EOPNOTSUPP.
// (posix_fallocate of glibc then reads and rewrites a byte of every block, also of what is in
// flight.)
void allocate(int fd, std::uint64_t offset, std::uint64_t num_bytes);

}  // namespace infinity

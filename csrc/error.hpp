// What the core throws. std::system_error becomes OSError with its errno, std::invalid_argument
// ValueError, std::runtime_error RuntimeError (bindings.cpp).
#pragma once

#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>

namespace infinity {

[[noreturn]] inline void throw_errno(int error_number, const std::string& what) {
  throw std::system_error(error_number, std::generic_category(), what);
}

[[noreturn]] inline void throw_last_errno(const std::string& what) { throw_errno(errno, what); }

inline void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

}  // namespace infinity

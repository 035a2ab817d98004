#include "engine.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>

#include "descriptor.hpp"
#include "error.hpp"
#include "wire.hpp"

namespace infinity {
namespace {

constexpr auto kProbeTimeout = std::chrono::seconds(5);

struct EngineEntry {
  std::string_view name;
  std::unique_ptr<IoEngine> (*make)(unsigned queue_depth);
  std::string_view missing;  // what the build lacked, if make is null
};

constexpr EngineEntry kEngines[] = {
#if INFINITY_HAVE_LIBURING
    {"io_uring", make_uring_engine, ""},
#else
    {"io_uring", nullptr, "liburing"},
#endif
#if INFINITY_HAVE_LIBAIO
    {"libaio", make_libaio_engine, ""},
#else
    {"libaio", nullptr, "libaio"},
#endif
    {"posix", make_posix_engine, ""},
};

const EngineEntry& find_engine(std::string_view name) {
  const auto* found = std::ranges::find(kEngines, name, &EngineEntry::name);
  if (found == std::end(kEngines)) {
    throw std::invalid_argument("engine '" + std::string(name) +
                                "' is none of io_uring, libaio, posix");
  }
  return *found;
}

std::string not_built(const EngineEntry& entry) {
  return std::string(entry.name) + " is not built in: " + std::string(entry.missing) +
         " was missing at build time";
}

// Moves one I/O through an idle engine and returns its result.
std::int64_t run_one(IoEngine& engine, const Io& io) {
  if (engine.submit({&io, 1}) != 1) throw_errno(EAGAIN, "submit");
  IoResult result;
  const auto deadline = std::chrono::steady_clock::now() + kProbeTimeout;
  while (engine.reap({&result, 1}) == 0) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) throw_errno(ETIMEDOUT, "wait for one I/O");
    engine.wait(static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(left).count()));
  }
  return result.result;
}

void move_a_page(IoEngine& engine) {
  const Descriptor file(::memfd_create("probe", MFD_CLOEXEC));
  if (file.get() < 0) throw_last_errno("memfd_create");
  alignas(wire::kPage) std::array<std::byte, wire::kPage> written;
  alignas(wire::kPage) std::array<std::byte, wire::kPage> found{};
  written.fill(std::byte{0xa5});
  Io io{.op = IoOp::kWrite, .fd = file.get(), .data = written.data(), .num_bytes = wire::kPage};
  for (auto* page : {&written, &found}) {
    io.data = page->data();
    const std::int64_t result = run_one(engine, io);
    if (result < 0) throw_errno(static_cast<int>(-result), "one I/O");
    if (result != static_cast<std::int64_t>(wire::kPage)) throw_errno(EIO, "one I/O was short");
    io.op = IoOp::kRead;
  }
  if (found != written) throw_errno(EIO, "the bytes read are not those written");
}

}  // namespace

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const auto& entry : kEngines) {
    if (entry.make != nullptr) names.emplace_back(entry.name);
  }
  return names;
}

std::unique_ptr<IoEngine> make_engine(std::string_view name, unsigned queue_depth) {
  const EngineEntry& entry = find_engine(name);
  if (entry.make == nullptr) throw_errno(ENOSYS, not_built(entry));
  return entry.make(queue_depth);
}

std::optional<std::string> probe_engine(std::string_view name) {
  const EngineEntry& entry = find_engine(name);
  if (entry.make == nullptr) return not_built(entry);
  try {
    move_a_page(*entry.make(1));
    return std::nullopt;
  } catch (const std::system_error& error) {
    return error.what();
  }
}

}  // namespace infinity

// Who performs the I/O. An engine moves single blocks and reports each one's result; it neither
// cuts, orders, retries nor verifies: the reactor does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace infinity {

enum class IoOp : std::uint8_t { kRead = 0, kWrite = 1 };

inline constexpr int kNotRegistered = -1;

// Of the engines' own entries in a kernel queue: tokens of I/Os are smaller, and no library uses it
// (liburing keeps ~0 to itself, and swallows what comes back with it on kernels before 5.11).
inline constexpr std::uint64_t kWakeToken = std::uint64_t{1} << 63;

// How long an engine sleeps at most while wake cannot end it, or while I/Os wait to be handed over.
inline constexpr int kUnwatchedMs = 10;

// A timeout that is no longer than that; negative timeouts are endless.
constexpr int bounded_ms(int timeout_ms) noexcept {
  return timeout_ms < 0 || timeout_ms > kUnwatchedMs ? kUnwatchedMs : timeout_ms;
}

// One I/O. The caller keeps fd open and the bytes mapped until its result has been reaped.
struct Io {
  IoOp op{};
  int fd{};
  int file_slot = kNotRegistered;    // from register_file
  int buffer_slot = kNotRegistered;  // from register_buffer; covers all of the bytes
  std::byte* data = nullptr;
  std::uint32_t num_bytes{};
  std::uint64_t offset{};
  std::uint64_t token{};  // comes back in the result; below kWakeToken
};

struct IoResult {
  std::uint64_t token{};
  std::int64_t result{};  // bytes transferred, or -errno
};

// submit, reap and wait belong to one thread; wake and the register calls may come from others.
class IoEngine {
 public:
  IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;
  virtual ~IoEngine() = default;

  virtual std::string_view name() const noexcept = 0;

  // Takes the first n I/Os of the batch and returns n. Fewer than the batch: the rest is offered
  // again after a reap or a few milliseconds. An I/O that the kernel refuses outright counts as
  // taken and ends with its errno. Throws only if the engine as a whole is broken.
  virtual std::size_t submit(std::span<const Io> batch) = 0;

  // Results that are there, at most results.size(); never blocks.
  virtual std::size_t reap(std::span<IoResult> results) = 0;

  // Blocks until there may be results, wake was called since the last wait, or timeout_ms have
  // passed (negative: never). For after a reap that found nothing; may return early.
  virtual void wait(int timeout_ms) = 0;
  virtual void wake() = 0;

  // True if I/Os taken by submit could not be handed to the kernel yet: reap may find nothing until
  // submit (an empty batch will do) has been called again.
  virtual bool has_backlog() const noexcept { return false; }

  // Give the kernel a file or a buffer ahead of its I/Os, which saves a look-up and a page pin per
  // block. kNotRegistered where the engine has no such thing or the kernel refuses (memlock
  // limit): the I/O then works without. A registered buffer is at most kRegisteredBytesMax.
  virtual int register_file(int) { return kNotRegistered; }
  virtual void unregister_file(int) noexcept {}
  virtual int register_buffer(std::span<std::byte>) { return kNotRegistered; }
  virtual void unregister_buffer(int) noexcept {}
};

inline constexpr std::size_t kRegisteredBytesMax = std::size_t{1} << 30;

// One fault for tests: the nth I/O (from 0) of the direction that `what` names, of any direction
// for "delay" and "break".
struct Fault {
  std::string what;
  std::uint64_t nth{};
  std::uint64_t value{};
};

// However deep its queue: so many I/Os of it are in flight at once.
inline constexpr unsigned kPosixThreadsMax = 64;

std::unique_ptr<IoEngine> make_posix_engine(unsigned queue_depth);
std::unique_ptr<IoEngine> make_uring_engine(unsigned queue_depth);
std::unique_ptr<IoEngine> make_libaio_engine(unsigned queue_depth);

// Wraps an engine so that it fails as told; see _native.pyi for the kinds of fault.
std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> engine,
                                             std::vector<Fault> faults);

// Engines compiled in, best first.
std::vector<std::string> engine_names();

// std::invalid_argument for an unknown name, std::system_error if the engine cannot start.
std::unique_ptr<IoEngine> make_engine(std::string_view name, unsigned queue_depth);

// Starts the engine and moves a page through it: nullopt if that works, else one line of why not.
std::optional<std::string> probe_engine(std::string_view name);

}  // namespace infinity

// Linux native AIO through libaio.
#include <libaio.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "descriptor.hpp"
#include "engine.hpp"
#include "error.hpp"

namespace infinity {
namespace {

constexpr std::size_t kBatchMax = 64;

// Owns the AIO context and the eventfd. Its destructor is called with nothing in flight but the
// poll.
class LibaioEngine final : public IoEngine {
 public:
  explicit LibaioEngine(unsigned queue_depth) : wake_event_(Descriptor::event()) {
    const int result = io_queue_init(static_cast<int>(queue_depth) + 1, &context_);
    if (result == -EAGAIN) {
      throw_errno(EAGAIN, "io_setup (fs.aio-max-nr is used up: raise it with sysctl)");
    }
    if (result < 0) throw_errno(-result, "io_setup");
    keep_from_children();
    try {
      watch_wake_event();
    } catch (...) {
      io_queue_release(context_);
      throw;
    }
  }

  ~LibaioEngine() override { io_queue_release(context_); }

  std::string_view name() const noexcept override { return "libaio"; }
  void wake() override { signal_event(wake_event_.get()); }

  // One system call, which brings the results along: reap finds them here.
  void wait(int timeout_ms) override {
    if (!refused_.empty() || !held_.empty()) return;
    if (!watch_wake_event()) timeout_ms = bounded_ms(timeout_ms);
    timespec timeout{.tv_sec = timeout_ms / 1000, .tv_nsec = timeout_ms % 1000 * 1'000'000L};
    hold_events(1, events_.size(), timeout_ms < 0 ? nullptr : &timeout);
  }

  std::size_t submit(std::span<const Io> batch) override {
    std::size_t num_taken = 0;
    while (num_taken < batch.size()) {
      const auto part = batch.subspan(num_taken, std::min(batch.size() - num_taken, kBatchMax));
      const int result = submit_part(part);
      if (result == -EAGAIN || result == 0) break;
      if (result > 0) {
        num_taken += static_cast<std::size_t>(result);
      } else {
        refused_.push_back({part.front().token, result});
        ++num_taken;
      }
    }
    return num_taken;
  }

  std::size_t reap(std::span<IoResult> results) override {
    std::size_t num_reaped = std::min(results.size(), refused_.size());
    const auto last = refused_.begin() + static_cast<std::ptrdiff_t>(num_reaped);
    std::copy(refused_.begin(), last, results.begin());
    refused_.erase(refused_.begin(), last);
    timespec at_once{};  // of which libaio sees in the context's memory whether it needs a call
    while (num_reaped < results.size()) {
      if (held_.empty()) hold_events(0, results.size() - num_reaped, &at_once);
      if (held_.empty()) break;
      const io_event event = held_.front();
      held_ = held_.subspan(1);
      const auto token = reinterpret_cast<std::uint64_t>(event.data);
      // Both results are negative errnos in unsigned words; the second one is 0 for files.
      const auto second = static_cast<std::int64_t>(event.res2);
      const auto result = second < 0 ? second : static_cast<std::int64_t>(event.res);
      if (token == kWakeToken) {
        end_watch(result);
      } else {
        results[num_reaped++] = {token, result};
      }
    }
    return num_reaped;
  }

 private:
  // The context's address is that of its ring, which begins with its id and its number of events;
  // the header is as large as one of those. A child would inherit it for writing.
  // The kernel maps the ring, maybe where another one was: the sanitizer saw only that one written
  // to.
  [[gnu::no_sanitize("thread")]] void keep_from_children() noexcept {
    const std::size_t num_events = reinterpret_cast<const unsigned*>(context_)[1];
    ::madvise(context_, (num_events + 1) * sizeof(io_event), MADV_DONTFORK);  // whole pages
  }

  // Returns how many of the part the kernel took, or -errno of the first one.
  int submit_part(std::span<const Io> part) {
    std::array<iocb, kBatchMax> blocks;  // the kernel copies them
    std::array<iocb*, kBatchMax> pointers;
    for (std::size_t i = 0; i < part.size(); ++i) {
      prepare(blocks[i], part[i]);
      pointers[i] = &blocks[i];
    }
    return hand_over(pointers.data(), part.size());
  }

  int hand_over(iocb** pointers, std::size_t count) {
    int result;
    do {
      result = io_submit(context_, static_cast<long>(count), pointers);
    } while (result == -EINTR);
    return result;
  }

  // The wake-up event ends a wait through a poll in the context (Linux 4.18), armed anew after each
  // time. False if the kernel has no room for it just now.
  bool watch_wake_event() {
    if (is_watching_) return true;
    iocb block;
    iocb* pointer = &block;
    io_prep_poll(&block, wake_event_.get(), POLLIN);
    block.data = reinterpret_cast<void*>(kWakeToken);
    const int result = hand_over(&pointer, 1);
    if (result < 0 && result != -EAGAIN)
      throw_errno(-result, "io_submit of a poll (Linux 4.18 has it)");
    is_watching_ = result == 1;
    return is_watching_;
  }

  void end_watch(std::int64_t result) {
    is_watching_ = false;
    if (result < 0) throw_errno(static_cast<int>(-result), "poll of the wake-up event");
    drain_event(wake_event_.get());
  }

  static void prepare(iocb& block, const Io& io) {
    const auto offset = static_cast<long long>(io.offset);
    switch (io.op) {
      case IoOp::kRead:
        io_prep_pread(&block, io.fd, io.data, io.num_bytes, offset);
        break;
      case IoOp::kWrite:
        io_prep_pwrite(&block, io.fd, io.data, io.num_bytes, offset);
        break;
    }
    block.data = reinterpret_cast<void*>(io.token);
  }

  void hold_events(long events_min, std::size_t events_max, timespec* timeout) {
    const auto count = static_cast<long>(std::min(events_max, events_.size()));
    const int result = io_getevents(context_, events_min, count, events_.data(), timeout);
    if (result < 0 && result != -EINTR) throw_errno(-result, "io_getevents");
    held_ = std::span(events_).first(static_cast<std::size_t>(std::max(result, 0)));
  }

  Descriptor wake_event_;
  bool is_watching_ = false;
  io_context_t context_ = nullptr;
  std::array<io_event, kBatchMax> events_;
  std::span<const io_event> held_;  // of events_: not reaped yet
  std::vector<IoResult> refused_;
};

}  // namespace

std::unique_ptr<IoEngine> make_libaio_engine(unsigned queue_depth) {
  return std::make_unique<LibaioEngine>(queue_depth);
}

}  // namespace infinity

// Linux native AIO through libaio.
#include <libaio.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "descriptor.hpp"
#include "engine.hpp"
#include "error.hpp"

namespace infinity {
namespace {

constexpr std::size_t kBatchMax = 64;

// Owns the AIO context and the eventfd. Its destructor is called with nothing in flight.
class LibaioEngine final : public IoEngine {
 public:
  explicit LibaioEngine(unsigned queue_depth) : event_(Descriptor::event()) {
    const int result = io_queue_init(static_cast<int>(queue_depth), &context_);
    if (result == -EAGAIN) {
      throw_errno(EAGAIN, "io_setup (fs.aio-max-nr is used up: raise it with sysctl)");
    }
    if (result < 0) throw_errno(-result, "io_setup");
  }

  ~LibaioEngine() override { io_queue_release(context_); }

  std::string_view name() const noexcept override { return "libaio"; }
  void wait(int timeout_ms) override { await_event(event_.get(), timeout_ms); }
  void wake() override { signal_event(event_.get()); }

  std::size_t submit(std::span<const Io> batch) override {
    std::size_t num_taken = 0;
    while (num_taken < batch.size()) {
      const auto part = batch.subspan(num_taken, std::min(batch.size() - num_taken, kBatchMax));
      const int result = submit_part(part);
      if (result == -EAGAIN) break;
      if (result > 0) {
        num_taken += static_cast<std::size_t>(result);
      } else {
        end_refused(part.front(), result);
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
    while (num_reaped < results.size()) {
      const int num_events = get_events(results.size() - num_reaped);
      if (num_events == 0) return num_reaped;
      for (int i = 0; i < num_events; ++i) {
        const io_event& event = events_[static_cast<std::size_t>(i)];
        // Both results are negative errnos in unsigned words; the second one is 0 for files.
        const auto second = static_cast<std::int64_t>(event.res2);
        results[num_reaped++] = {reinterpret_cast<std::uint64_t>(event.data),
                                 second < 0 ? second : static_cast<std::int64_t>(event.res)};
      }
    }
    return num_reaped;
  }

 private:
  // Returns how many of the part the kernel took, or -errno of the first one.
  int submit_part(std::span<const Io> part) {
    std::array<iocb, kBatchMax> blocks;  // the kernel copies them
    std::array<iocb*, kBatchMax> pointers;
    for (std::size_t i = 0; i < part.size(); ++i) {
      prepare(blocks[i], part[i]);
      pointers[i] = &blocks[i];
    }
    int result;
    do {
      result = io_submit(context_, static_cast<long>(part.size()), pointers.data());
    } while (result == -EINTR);
    return result;
  }

  void prepare(iocb& block, const Io& io) const {
    const auto offset = static_cast<long long>(io.offset);
    switch (io.op) {
      case IoOp::kRead:
        io_prep_pread(&block, io.fd, io.data, io.num_bytes, offset);
        break;
      case IoOp::kWrite:
        io_prep_pwrite(&block, io.fd, io.data, io.num_bytes, offset);
        break;
      case IoOp::kFsync:
        io_prep_fsync(&block, io.fd);
        break;
    }
    block.data = reinterpret_cast<void*>(io.token);
    io_set_eventfd(&block, event_.get());
  }

  // The kernel would not take this one. A refused fsync means that kernel or filesystem have no
  // asynchronous one (before 4.18), so it is done here; anything else is the I/O's result.
  void end_refused(const Io& io, int result) {
    if (io.op == IoOp::kFsync && result == -EINVAL) result = ::fsync(io.fd) < 0 ? -errno : 0;
    refused_.push_back({io.token, result == 0 && io.op != IoOp::kFsync ? -EIO : result});
  }

  int get_events(std::size_t events_max) {
    timespec at_once{};
    const auto count = static_cast<long>(std::min(events_max, events_.size()));
    int result;
    do {
      result = io_getevents(context_, 0, count, events_.data(), &at_once);
    } while (result == -EINTR);
    if (result < 0) throw_errno(-result, "io_getevents");
    return result;
  }

  Descriptor event_;
  io_context_t context_ = nullptr;
  std::array<io_event, kBatchMax> events_;
  std::vector<IoResult> refused_;
};

}  // namespace

std::unique_ptr<IoEngine> make_libaio_engine(unsigned queue_depth) {
  return std::make_unique<LibaioEngine>(queue_depth);
}

}  // namespace infinity

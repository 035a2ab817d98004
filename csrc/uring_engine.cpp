// io_uring through liburing.
#include <liburing.h>
#include <poll.h>

#include <algorithm>
#include <mutex>

#include "descriptor.hpp"
#include "engine.hpp"
#include "error.hpp"

namespace infinity {
namespace {

constexpr unsigned kFilesMax = 1024;
constexpr unsigned kBuffersMax = 4096;  // pieces of up to 1 GiB

#ifdef LIBURING_UDATA_TIMEOUT
static_assert(kWakeToken != LIBURING_UDATA_TIMEOUT, "liburing swallows what comes back with it");
#endif

// The free slots of one of the kernel's sparse tables; any thread.
class SlotTable {
 public:
  // Has no slots until the kernel has made the table.
  void open(unsigned num_slots) {
    for (unsigned slot = num_slots; slot-- > 0;) free_.push_back(static_cast<int>(slot));
  }

  // Calls update(slot), which returns 0 or more on success, with a slot of its own.
  template <typename Update>
  int take(Update update) {
    const std::lock_guard lock(mutex_);
    if (free_.empty() || update(static_cast<unsigned>(free_.back())) < 0) return kNotRegistered;
    const int slot = free_.back();
    free_.pop_back();
    return slot;
  }

  // A slot that the kernel does not take back is not handed out again.
  template <typename Update>
  void give_back(int slot, Update update) noexcept {
    const std::lock_guard lock(mutex_);
    if (update(static_cast<unsigned>(slot)) >= 0) free_.push_back(slot);
  }

 private:
  std::mutex mutex_;
  std::vector<int> free_;
};

// Owns the ring and the eventfd. Its destructor is called with nothing in flight but the poll.
class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(unsigned queue_depth) : wake_event_(Descriptor::event()) {
    const int result = open_ring(queue_depth);
    if (result < 0) throw_errno(-result, explain(-result));
    // A forked child that exits must not tear pages out from under the ring.
    io_uring_ring_dontfork(&ring_);
    if (io_uring_register_files_sparse(&ring_, kFilesMax) == 0) files_.open(kFilesMax);
    if (io_uring_register_buffers_sparse(&ring_, kBuffersMax) == 0) buffers_.open(kBuffersMax);
  }

  ~UringEngine() override { io_uring_queue_exit(&ring_); }

  std::string_view name() const noexcept override { return "io_uring"; }
  bool has_backlog() const noexcept override { return io_uring_sq_ready(&ring_) > 0; }

  std::size_t submit(std::span<const Io> batch) override {
    std::size_t num_taken = 0;
    for (; num_taken < batch.size(); ++num_taken) {
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      if (sqe == nullptr) break;
      prepare(*sqe, batch[num_taken]);
    }
    flush();
    return num_taken;
  }

  std::size_t reap(std::span<IoResult> results) override {
    std::size_t num_reaped = 0;
    io_uring_cqe* cqe = nullptr;
    while (num_reaped < results.size() && io_uring_peek_cqe(&ring_, &cqe) == 0) {
      const IoResult result{cqe->user_data, cqe->res};
      io_uring_cqe_seen(&ring_, cqe);
      if (result.token == kWakeToken) {
        end_watch(static_cast<int>(result.result));
      } else {
        results[num_reaped++] = result;
      }
    }
    return num_reaped;
  }

  // One system call that also lets the kernel post completions. (While the thread sleeps in poll(2)
  // on the ring instead, each completion first interrupts that call and then restarts it.)
  void wait(int timeout_ms) override {
    watch_wake_event();
    if (!is_watching_ || has_backlog()) timeout_ms = bounded_ms(timeout_ms);
    io_uring_cqe* cqe = nullptr;
    const int result = timeout_ms < 0 ? io_uring_wait_cqe(&ring_, &cqe) : wait_at_most(timeout_ms);
    if (result < 0 && result != -ETIME && !is_passing(result))
      throw_errno(-result, "io_uring wait");
  }

  void wake() override { signal_event(wake_event_.get()); }

  int register_file(int fd) override {
    return files_.take(
        [&](unsigned slot) { return io_uring_register_files_update(&ring_, slot, &fd, 1); });
  }

  void unregister_file(int slot) noexcept override {
    int none = -1;
    files_.give_back(
        slot, [&](unsigned s) { return io_uring_register_files_update(&ring_, s, &none, 1); });
  }

  int register_buffer(std::span<std::byte> bytes) override {
    return buffers_.take([&](unsigned slot) { return update_buffer(slot, bytes); });
  }

  void unregister_buffer(int slot) noexcept override {
    buffers_.give_back(slot, [&](unsigned s) { return update_buffer(s, {}); });
  }

 private:
  int open_ring(unsigned queue_depth) {
#ifdef IORING_SETUP_COOP_TASKRUN
    // Completions wait for the thread's next system call instead of interrupting it (Linux 5.19).
    if (io_uring_queue_init(queue_depth, &ring_, IORING_SETUP_COOP_TASKRUN) == 0) return 0;
#endif
    return io_uring_queue_init(queue_depth, &ring_, 0);
  }

  static std::string explain(int error_number) {
    switch (error_number) {
      case EPERM:
      case EACCES:
      case ENOSYS:
        return "io_uring_queue_init (forbidden by a seccomp filter or kernel.io_uring_disabled)";
      case ENOMEM:
        return "io_uring_queue_init (the memlock limit is too small: ulimit -l)";
      default:
        return "io_uring_queue_init";
    }
  }

  static void prepare(io_uring_sqe& sqe, const Io& io) {
    const int fd = io.file_slot == kNotRegistered ? io.fd : io.file_slot;
    const bool fixed = io.buffer_slot != kNotRegistered;
    switch (io.op) {
      case IoOp::kRead:
        if (fixed) {
          io_uring_prep_read_fixed(&sqe, fd, io.data, io.num_bytes, io.offset, io.buffer_slot);
        } else {
          io_uring_prep_read(&sqe, fd, io.data, io.num_bytes, io.offset);
        }
        break;
      case IoOp::kWrite:
        if (fixed) {
          io_uring_prep_write_fixed(&sqe, fd, io.data, io.num_bytes, io.offset, io.buffer_slot);
        } else {
          io_uring_prep_write(&sqe, fd, io.data, io.num_bytes, io.offset);
        }
        break;
    }
    if (io.file_slot != kNotRegistered) sqe.flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(&sqe, io.token);
  }

  // Hands what is prepared to the kernel. It may stop early at an I/O that it refuses, which then
  // has a result; the rest goes with the next call.
  void flush() {
    while (io_uring_sq_ready(&ring_) > 0) {
      const int result = io_uring_submit(&ring_);
      if (result == -EINTR) continue;
      if (result == 0 || is_passing(result)) return;  // has_backlog() is true
      if (result < 0) throw_errno(-result, "io_uring_submit");
    }
  }

  // What the kernel answers when it wants to be asked again: interrupted, out of memory for now, or
  // with results to be reaped first.
  static bool is_passing(int result) {
    return result == -EINTR || result == -EAGAIN || result == -EBUSY;
  }

  // The wake-up event ends a wait through a poll in the ring, armed anew after each time. While the
  // kernel takes nothing the poll is in the backlog, or there is no room for it at all.
  void watch_wake_event() {
    if (is_watching_) return;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return;
    io_uring_prep_poll_add(sqe, wake_event_.get(), POLLIN);
    io_uring_sqe_set_data64(sqe, kWakeToken);
    is_watching_ = true;
    flush();
  }

  void end_watch(int result) {
    is_watching_ = false;
    if (result < 0 && !is_passing(result)) throw_errno(-result, "poll of the wake-up event");
    drain_event(wake_event_.get());
  }

  // Before Linux 5.11 liburing makes a timeout an entry of the ring, which itself may be refused
  // and then points to a stack frame that is gone: poll(2) on the ring needs none.
  int wait_at_most(int timeout_ms) {
    if ((ring_.features & IORING_FEAT_EXT_ARG) == 0) {
      pollfd ready{ring_.ring_fd, POLLIN, 0};
      return ::poll(&ready, 1, timeout_ms) < 0 ? -errno : 0;
    }
    io_uring_cqe* cqe = nullptr;
    __kernel_timespec timeout{.tv_sec = timeout_ms / 1000,
                              .tv_nsec = timeout_ms % 1000 * 1'000'000LL};
    return io_uring_wait_cqes(&ring_, &cqe, 1, &timeout, nullptr);
  }

  int update_buffer(unsigned slot, std::span<std::byte> bytes) {
    const iovec buffer{bytes.data(), bytes.size()};
    const __u64 tag = 0;
    return io_uring_register_buffers_update_tag(&ring_, slot, &buffer, &tag, 1);
  }

  Descriptor wake_event_;
  bool is_watching_ = false;
  io_uring ring_{};
  SlotTable files_;
  SlotTable buffers_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(unsigned queue_depth) {
  return std::make_unique<UringEngine>(queue_depth);
}

}  // namespace infinity

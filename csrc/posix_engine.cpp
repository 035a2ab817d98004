// pread and pwrite on threads: works wherever files do, and is the reference for the others.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "descriptor.hpp"
#include "engine.hpp"
#include "thread.hpp"

namespace infinity {
namespace {

std::int64_t perform(const Io& io) noexcept {
  const auto offset = static_cast<off_t>(io.offset);
  const std::int64_t result = io.op == IoOp::kRead ? ::pread(io.fd, io.data, io.num_bytes, offset)
                                                   : ::pwrite(io.fd, io.data, io.num_bytes, offset);
  return result < 0 ? -errno : result;
}

// Owns its threads and the eventfd. One thread per I/O in flight, so that the queue depth means the
// same as with the other engines.
class PosixEngine final : public IoEngine {
 public:
  explicit PosixEngine(unsigned queue_depth) : event_(Descriptor::event()) {
    const unsigned num_threads = std::min(queue_depth, kPosixThreadsMax);
    threads_.reserve(num_threads);
    try {
      for (unsigned i = 0; i < num_threads; ++i) {
        threads_.push_back(start_thread("io-posix", [this] { serve(); }));
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  ~PosixEngine() override { stop(); }

  std::string_view name() const noexcept override { return "posix"; }
  void wait(int timeout_ms) override { await_event(event_.get(), timeout_ms); }
  void wake() override { signal_event(event_.get()); }

  std::size_t submit(std::span<const Io> batch) override {
    {
      const std::lock_guard lock(mutex_);
      queued_.insert(queued_.end(), batch.begin(), batch.end());
    }
    for (std::size_t i = 0; i < batch.size(); ++i) work_.notify_one();
    return batch.size();
  }

  std::size_t reap(std::span<IoResult> results) override {
    const std::lock_guard lock(mutex_);
    const std::size_t num_reaped = std::min(results.size(), ended_.size());
    const auto last = ended_.begin() + static_cast<std::ptrdiff_t>(num_reaped);
    std::copy(ended_.begin(), last, results.begin());
    ended_.erase(ended_.begin(), last);
    return num_reaped;
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return stopping_ || !queued_.empty(); });
      if (queued_.empty()) return;
      const Io io = queued_.front();
      queued_.pop_front();
      lock.unlock();
      const IoResult result{io.token, perform(io)};
      lock.lock();
      ended_.push_back(result);
      if (ended_.size() == 1) signal_event(event_.get());
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  Descriptor event_;
  std::mutex mutex_;  // guards all that follows but the threads
  std::condition_variable work_;
  std::deque<Io> queued_;
  std::deque<IoResult> ended_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_posix_engine(unsigned queue_depth) {
  return std::make_unique<PosixEngine>(queue_depth);
}

}  // namespace infinity

// An engine that fails as told, for tests of everything above it.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "engine.hpp"
#include "error.hpp"
#include "wire.hpp"

namespace infinity {
namespace {

using Clock = std::chrono::steady_clock;

struct FreeBytes {
  void operator()(std::byte* bytes) const noexcept { std::free(bytes); }
};
using PageBytes = std::unique_ptr<std::byte, FreeBytes>;

PageBytes copy_to_pages(const Io& io) {
  const std::size_t bytes = (io.num_bytes + wire::kPage - 1) / wire::kPage * wire::kPage;
  PageBytes copy(static_cast<std::byte*>(std::aligned_alloc(wire::kPage, bytes)));
  if (copy == nullptr) throw std::bad_alloc();
  std::memcpy(copy.get(), io.data, io.num_bytes);
  return copy;
}

// What is to happen to one I/O that the inner engine holds.
struct Disturbance {
  std::int64_t bytes_max = -1;  // -1: all
  std::byte* flip = nullptr;    // byte to flip once it has been read
  PageBytes corrupt;            // owns the bytes written in place of the caller's
  std::chrono::microseconds delay{0};
};

struct LateResult {
  Clock::time_point due;
  IoResult result;
};

// Owns the inner engine and what it has ended but is not to be seen yet.
class FaultyEngine final : public IoEngine {
 public:
  FaultyEngine(std::unique_ptr<IoEngine> inner, std::vector<Fault> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {
    for (const Fault& fault : faults_) check(fault);
  }

  std::string_view name() const noexcept override { return inner_->name(); }
  void wake() override { inner_->wake(); }
  bool has_backlog() const noexcept override { return inner_->has_backlog(); }
  int register_file(int fd) override { return inner_->register_file(fd); }
  void unregister_file(int slot) noexcept override { inner_->unregister_file(slot); }
  int register_buffer(std::span<std::byte> bytes) override {
    return inner_->register_buffer(bytes);
  }
  void unregister_buffer(int slot) noexcept override { inner_->unregister_buffer(slot); }

  std::size_t submit(std::span<const Io> batch) override {
    if (batch.empty()) return inner_->submit(batch);
    std::size_t num_taken = 0;
    while (num_taken < batch.size() && submit_one(batch[num_taken])) ++num_taken;
    return num_taken;
  }

  std::size_t reap(std::span<IoResult> results) override {
    // All of them: what stayed behind might be waited for in vain while this one's are delayed.
    while (const std::size_t num_inner = inner_->reap(results)) {
      for (const IoResult& result : results.first(num_inner)) end(result);
    }
    const auto now = Clock::now();
    std::size_t num_reaped = 0;
    for (auto late = ended_.begin(); late != ended_.end() && num_reaped < results.size();) {
      if (late->due > now) {
        ++late;
        continue;
      }
      results[num_reaped++] = late->result;
      late = ended_.erase(late);
    }
    return num_reaped;
  }

  void wait(int timeout_ms) override {
    if (!ended_.empty()) {
      const auto next = std::ranges::min(ended_, {}, &LateResult::due).due;
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now()).count();
      const auto left_ms = static_cast<int>(std::max<std::int64_t>(left, 0));
      timeout_ms = timeout_ms < 0 ? left_ms : std::min(timeout_ms, left_ms);
    }
    inner_->wait(timeout_ms);
  }

 private:
  static void check(const Fault& fault) {
    static constexpr std::string_view kKinds[] = {"errno_read",  "errno_write", "short_read",
                                                  "short_write", "flip_read",   "flip_write",
                                                  "delay",       "break"};
    if (std::ranges::find(kKinds, fault.what) == std::end(kKinds)) {
      throw std::invalid_argument("unknown fault '" + fault.what + "'");
    }
  }

  const Fault* find(const std::string& what, std::uint64_t nth) const {
    const auto found = std::ranges::find_if(
        faults_, [&](const Fault& fault) { return fault.what == what && fault.nth == nth; });
    return found == faults_.end() ? nullptr : &*found;
  }

  bool submit_one(Io io) {
    if (const Fault* fault = find("break", num_ios_)) {
      throw_errno(static_cast<int>(fault->value), "injected fault");
    }
    Disturbance disturbance;
    const Fault* delay = find("delay", num_ios_);
    if (delay != nullptr) disturbance.delay = std::chrono::microseconds(delay->value);
    std::optional<std::int64_t> instead;
    if (io.op == IoOp::kRead) instead = disturb(io, disturbance, "read", num_reads_);
    if (io.op == IoOp::kWrite) instead = disturb(io, disturbance, "write", num_writes_);
    const std::uint64_t token = io.token;
    held_[token] = std::move(disturbance);
    if (instead.has_value()) {
      end({token, *instead});
    } else if (inner_->submit({&io, 1}) == 0) {
      held_.erase(token);
      return false;
    }
    ++num_ios_;
    num_reads_ += io.op == IoOp::kRead ? 1 : 0;
    num_writes_ += io.op == IoOp::kWrite ? 1 : 0;
    return true;
  }

  // Changes the I/O as the faults say; a value means that it is not performed but ends with that.
  std::optional<std::int64_t> disturb(Io& io, Disturbance& disturbance,
                                      const std::string& direction, std::uint64_t nth) const {
    if (const Fault* fault = find("errno_" + direction, nth)) {
      return -static_cast<std::int64_t>(fault->value);
    }
    if (const Fault* fault = find("flip_" + direction, nth); fault && fault->value < io.num_bytes) {
      if (io.op == IoOp::kRead) {
        disturbance.flip = io.data + fault->value;
      } else {
        disturbance.corrupt = copy_to_pages(io);
        io.data = disturbance.corrupt.get();
        io.buffer_slot = kNotRegistered;
        io.data[fault->value] ^= std::byte{1};
      }
    }
    if (const Fault* fault = find("short_" + direction, nth);
        fault && fault->value < io.num_bytes) {
      if (fault->value == 0) return 0;
      // Whole pages, so that direct I/O takes it; what is reported is what was asked for.
      disturbance.bytes_max = static_cast<std::int64_t>(fault->value);
      const auto pages = (fault->value + wire::kPage - 1) / wire::kPage * wire::kPage;
      io.num_bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(io.num_bytes, pages));
    }
    return std::nullopt;
  }

  void end(IoResult result) {
    auto node = held_.extract(result.token);
    const Disturbance& disturbance = node.mapped();
    if (disturbance.flip != nullptr && result.result > 0) *disturbance.flip ^= std::byte{1};
    if (disturbance.bytes_max >= 0) result.result = std::min(result.result, disturbance.bytes_max);
    ended_.push_back({Clock::now() + disturbance.delay, result});
  }

  std::unique_ptr<IoEngine> inner_;
  std::vector<Fault> faults_;
  std::unordered_map<std::uint64_t, Disturbance> held_;
  std::deque<LateResult> ended_;
  std::uint64_t num_ios_ = 0;
  std::uint64_t num_reads_ = 0;
  std::uint64_t num_writes_ = 0;
};

}  // namespace

std::unique_ptr<IoEngine> make_faulty_engine(std::unique_ptr<IoEngine> engine,
                                             std::vector<Fault> faults) {
  return std::make_unique<FaultyEngine>(std::move(engine), std::move(faults));
}

}  // namespace infinity

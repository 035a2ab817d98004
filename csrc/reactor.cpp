#include "reactor.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "atomics.hpp"
#include "checksum.hpp"
#include "error.hpp"
#include "thread.hpp"
#include "wire.hpp"

namespace infinity {
namespace {

constexpr std::size_t kRequestsMax = 65536;  // accepted and not reaped yet
constexpr unsigned kRetriesMax = 64;         // of one block, after EINTR or EAGAIN
constexpr int kStallMs = 10;                 // until a stalled engine is offered its I/Os again
constexpr std::size_t kOfferedMax = 2;       // blocks, to the engine at once
constexpr std::size_t kReapedMax = 16;       // results, from it
// A checksum takes about as long as a submission from here on: start the device on the first block
// before summing the second.
constexpr std::size_t kSummedBytesPerBatch = std::size_t{1} << 18;

std::uint64_t now_ns() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(now).count());
}

}  // namespace

Reactor::Reactor(std::unique_ptr<IoEngine> engine, unsigned queue_depth, std::uint32_t block_bytes,
                 std::unique_ptr<Latencies> latencies)
    : latencies_(std::move(latencies)),
      owner_pid_(::getpid()),
      engine_name_(engine->name()),
      block_bytes_(block_bytes),
      completed_event_(Descriptor::event()),
      engine_(std::move(engine)) {
  require(queue_depth > 0 && queue_depth <= kQueueDepthMax, "queue_depth is not in 1..4096");
  require(block_bytes > 0 && block_bytes % wire::kPage == 0 && block_bytes <= kBlockBytesMax,
          "block_bytes is not a multiple of 4096 up to 2**30");
  blocks_.resize(queue_depth);
  for (std::size_t cell = queue_depth; cell-- > 0;) free_cells_.push_back(cell);
}

// ---- The callers' side ----

void Reactor::refuse_if_ended() const {
  if (broken_errno_ != 0) throw_errno(broken_errno_, "the " + engine_name_ + " engine broke down");
  if (closing_) throw std::runtime_error("the reactor is closed");
}

int Reactor::add_file(int fd) { return files_.add(std::make_shared<RegisteredFile>(engine(), fd)); }

void Reactor::remove_file(int index) { files_.remove(index); }

int Reactor::add_buffer(std::shared_ptr<Region> region) {
  return buffers_.add(std::make_shared<RegisteredBuffer>(engine(), std::move(region)));
}

void Reactor::remove_buffer(int index) { buffers_.remove(index); }

std::shared_ptr<IoEngine> Reactor::engine() const {
  const std::lock_guard lock(mutex_);
  refuse_if_ended();
  return engine_;
}

void Reactor::submit(Request request) {
  if (::getpid() != owner_pid_) throw std::runtime_error("the reactor belongs to another process");
  const std::lock_guard lock(mutex_);
  refuse_if_ended();
  if (num_unreaped_ >= kRequestsMax) {
    throw std::runtime_error(std::to_string(kRequestsMax) + " requests have not been reaped yet");
  }
  auto file = files_.find(request.file);
  auto buffer = buffers_.find(request.buffer);
  incoming_.emplace_back(std::move(request), std::move(file), std::move(buffer), block_bytes_,
                         blocks_.size());
  ++num_unreaped_;
  wake_thread();
}

void Reactor::wake_thread() {
  if (std::exchange(thread_sleeps_, false)) engine_->wake();
}

std::vector<Completion> Reactor::reap(std::size_t completions_max) {
  const std::lock_guard lock(mutex_);
  if (completed_.empty() && broken_errno_ != 0) refuse_if_ended();
  const std::size_t num_reaped = std::min(completions_max, completed_.size());
  const auto last = completed_.begin() + static_cast<std::ptrdiff_t>(num_reaped);
  std::vector<Completion> completions(completed_.begin(), last);
  completed_.erase(completed_.begin(), last);
  num_unreaped_ -= num_reaped;
  if (!completed_.empty() || broken_errno_ != 0) signal_event(completed_event_.get());
  return completions;
}

ReactorStats Reactor::stats() const {
  const std::lock_guard lock(mutex_);
  ReactorStats stats = stats_;
  stats.num_in_flight = num_unreaped_ - completed_.size();
  return stats;
}

void Reactor::begin_close() noexcept {
  if (::getpid() != owner_pid_) return;  // the thread did not come along
  const std::lock_guard lock(mutex_);
  closing_ = true;
  wake_thread();
}

bool Reactor::close(std::chrono::milliseconds timeout) {
  if (::getpid() != owner_pid_) return true;
  begin_close();
  std::unique_lock lock(mutex_);
  ended_condition_.wait_for(lock, timeout, [this] { return ended_ || broken_errno_ != 0; });
  return ended_;
}

// ---- The I/O thread's side ----

bool Reactor::run() noexcept {
  try {
    serve();
  } catch (const std::system_error& error) {
    break_down(error.code().value());
    return false;
  } catch (const std::exception&) {
    break_down(ENOMEM);
    return false;
  }
  files_.close();
  buffers_.close();
  const std::lock_guard lock(mutex_);
  thread_sleeps_ = false;  // there is nobody to wake
  engine_.reset();
  ended_ = true;
  ended_condition_.notify_all();
  return true;
}

void Reactor::serve() {
  while (true) {
    bool progressed = accept_requests();
    progressed |= send_blocks();
    progressed |= reap_blocks();
    publish();
    if (progressed) continue;
    if (finished()) return;
    sleep();
  }
}

bool Reactor::accept_requests() {
  std::unique_lock lock(mutex_);
  thread_sleeps_ = false;
  if (incoming_.empty()) return false;
  auto accepted = std::exchange(incoming_, {});
  lock.unlock();
  for (ActiveRequest& request : accepted) {
    requests_.push_back(std::move(request));
    if (next_to_cut_ == requests_.end()) next_to_cut_ = std::prev(requests_.end());
  }
  return true;
}

// One batch: results are looked for before the next one, so that none of them waits for long.
bool Reactor::send_blocks() {
  cut_blocks();
  const std::size_t num_offered = std::min(outgoing_.size(), kOfferedMax);
  if (num_offered == 0 && !engine_->has_backlog()) {
    engine_is_stalled_ = false;
    return false;
  }
  const std::size_t num_taken = offer_blocks(num_offered);
  engine_is_stalled_ = num_taken < num_offered || engine_->has_backlog();
  return num_taken > 0;
}

void Reactor::cut_blocks() {
  std::size_t summed_bytes = 0;
  while (next_to_cut_ != requests_.end() && !free_cells_.empty() &&
         outgoing_.size() < kOfferedMax && summed_bytes < kSummedBytesPerBatch) {
    const ActiveRequest& request = *next_to_cut_;
    const bool is_summed = request.request.op == IoOp::kWrite && request.checksums != nullptr;
    cut_block();
    if (is_summed) summed_bytes += block_bytes_;
  }
}

void Reactor::cut_block() {
  ActiveRequest& active = *next_to_cut_;
  const std::size_t cell = free_cells_.back();
  free_cells_.pop_back();
  const Block block{
      .request = next_to_cut_, .index = active.num_cut, .extent = active.next_block(cell)};
  if (block.op() == IoOp::kWrite) {
    active.write_header(block.extent);
    if (active.checksums != nullptr) {
      store_release(active.checksums[block.index], crc32c(block.bytes()));
    }
  }
  blocks_[cell] = block;
  outgoing_.push_back(cell);
  ++active.num_in_flight;
  ++active.num_cut;
  if (active.all_cut()) ++next_to_cut_;
}

std::uint64_t Reactor::clock_ns() const noexcept { return latencies_ == nullptr ? 0 : now_ns(); }

// Two clock readings a batch: what lies between them is the slat of each of its blocks.
std::size_t Reactor::offer_blocks(std::size_t num_offered) {
  std::array<Io, kOfferedMax> batch;
  const std::uint64_t offered_ns = clock_ns();
  for (std::size_t i = 0; i < num_offered; ++i) {
    Block& block = blocks_[outgoing_[i]];
    if (block.offered_ns == 0) block.offered_ns = offered_ns;
    batch[i] = describe(outgoing_[i]);
  }
  const std::size_t num_taken = engine_->submit({batch.data(), num_offered});
  const std::uint64_t taken_ns = clock_ns();
  for (std::size_t i = 0; i < num_taken; ++i) {
    Block& block = blocks_[outgoing_.front()];
    if (block.taken_ns == 0) block.taken_ns = taken_ns;
    outgoing_.pop_front();
  }
  return num_taken;
}

Io Reactor::describe(std::size_t cell) const {
  const Block& block = blocks_[cell];
  const ActiveRequest& active = *block.request;
  Io io{.op = block.op(), .fd = active.file->fd(), .file_slot = active.file->slot(), .token = cell};
  const auto rest = block.bytes().subspan(block.resume_at);
  io.data = rest.data();
  io.num_bytes = static_cast<std::uint32_t>(rest.size());
  const BlockPlace& place = block.extent.place;
  io.offset = place.offset + block.resume_at;
  io.buffer_slot = active.buffer->slot(place.buffer_offset + block.resume_at, rest.size());
  return io;
}

bool Reactor::reap_blocks() {
  std::array<IoResult, kReapedMax> results;
  const std::size_t num_reaped = engine_->reap(results);
  if (num_reaped == 0) return false;
  const std::uint64_t reaped_ns = clock_ns();
  for (const IoResult& result : std::span(results).first(num_reaped)) {
    end_round(static_cast<std::size_t>(result.token), result.result, reaped_ns);
  }
  return true;
}

void Reactor::end_round(std::size_t cell, std::int64_t result, std::uint64_t reaped_ns) {
  Block& block = blocks_[cell];
  if ((result == -EINTR || result == -EAGAIN) && block.num_retries < kRetriesMax) {
    ++block.num_retries;
    outgoing_.push_front(cell);
    return;
  }
  if (result < 0) {
    fail(block, IoStatus::kIoError, static_cast<int>(-result), block.num_bytes(), block.num_done);
  } else {
    count(block, result);
    const auto reached = static_cast<std::uint32_t>(block.resume_at + result);
    if (reached < block.num_bytes() && reached > block.num_done) {
      block.num_done = reached;
      block.resume_at = reached - reached % std::uint32_t{wire::kPage};
      outgoing_.push_front(cell);
      return;
    }
    if (reached < block.num_bytes()) {
      fail(block, IoStatus::kShortIo, 0, block.num_bytes(), block.num_done);
    } else {
      if (latencies_ != nullptr) {
        timed_.push_back(
            {block.op(), block.taken_ns - block.offered_ns, reaped_ns - block.taken_ns});
      }
      if (block.request->request.verify) verify(block);
    }
  }
  free_block(cell);
}

void Reactor::count(const Block& block, std::int64_t result) {
  const auto bytes = static_cast<std::uint64_t>(result);
  if (block.op() == IoOp::kRead) {
    ++delta_.num_reads;
    delta_.bytes_read += bytes;
  } else {
    ++delta_.num_writes;
    delta_.bytes_written += bytes;
  }
  if (bytes < block.num_bytes() - block.resume_at) ++delta_.num_short;
}

void Reactor::verify(Block& block) {
  const ActiveRequest& active = *block.request;
  const std::uint32_t stored = load_acquire(active.checksums[block.index]);
  const std::uint32_t found = crc32c(block.bytes());
  if (found != stored) fail(block, IoStatus::kIntegrity, 0, stored, found);
}

// Leaves the rest of the request uncut. Of several errors that of the first block is kept: the
// blocks before it were cut earlier and are waited for, so the report does not depend on the order
// in which blocks end.
void Reactor::fail(Block& block, IoStatus status, int error_number, std::uint64_t expected,
                   std::uint64_t actual) {
  ActiveRequest& active = *block.request;
  if (active.completion.status != IoStatus::kOk && active.first_failed < block.index) return;
  active.first_failed = block.index;
  active.completion = {active.request.tag,        status,   error_number,
                       block.extent.place.offset, expected, actual};
  if (next_to_cut_ == block.request) ++next_to_cut_;
  active.num_blocks = active.num_cut;
}

void Reactor::free_block(std::size_t cell) {
  const RequestPosition request = blocks_[cell].request;
  free_cells_.push_back(cell);
  if (--request->num_in_flight == 0 && request->all_cut()) settle(request);
}

// Lets go of file, buffer and checksums before the completion can be seen: whoever has seen it may
// remove them.
void Reactor::settle(RequestPosition request) {
  settled_.push_back(request->completion);
  requests_.erase(request);
}

void Reactor::publish() {
  if (settled_.empty() && delta_.num_reads == 0 && delta_.num_writes == 0) return;
  const std::lock_guard lock(mutex_);
  completed_.insert(completed_.end(), settled_.begin(), settled_.end());
  stats_.bytes_read += delta_.bytes_read;
  stats_.bytes_written += delta_.bytes_written;
  stats_.num_reads += delta_.num_reads;
  stats_.num_writes += delta_.num_writes;
  stats_.num_short += delta_.num_short;
  delta_ = {};
  for (const BlockTime& block : timed_) {
    (block.op == IoOp::kRead ? latencies_->read : latencies_->write)
        .record(block.slat_ns, block.clat_ns);
  }
  timed_.clear();
  if (!settled_.empty()) signal_event(completed_event_.get());
  settled_.clear();
}

bool Reactor::finished() {
  const std::lock_guard lock(mutex_);
  return closing_ && incoming_.empty() && requests_.empty();
}

// The one place where the thread blocks.
void Reactor::sleep() {
  {
    const std::lock_guard lock(mutex_);
    if (!incoming_.empty() || (closing_ && requests_.empty())) return;
    thread_sleeps_ = true;
  }
  engine_->wait(engine_is_stalled_ ? kStallMs : -1);
}

// The engine as a whole is broken: what had ended is reported, whoever looks for more is told why,
// and nobody is let in any more. What is in flight is in the kernel's hands: neither its memory nor
// its files are let go of, and no completion says that they are free.
void Reactor::break_down(int error_number) noexcept {
  const std::lock_guard lock(mutex_);
  broken_errno_ = error_number;
  thread_sleeps_ = false;
  completed_.insert(completed_.end(), settled_.begin(), settled_.end());
  settled_.clear();
  signal_event(completed_event_.get());
  ended_condition_.notify_all();
}

void run_on_thread(std::shared_ptr<Reactor> reactor) {
  start_thread("io-reactor", [reactor = std::move(reactor)] {
    if (reactor->run()) return;
    while (true) ::pause();  // takes no signals: holds all of it until the process ends
  }).detach();
}

}  // namespace infinity

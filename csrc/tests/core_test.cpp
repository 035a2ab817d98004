// The core without Python, so that every path of it runs under ASan, UBSan and TSan. The wider
// tests of behaviour are in tests/csrc.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>

#include "bench_reactor.hpp"
#include "checksum.hpp"
#include "descriptor.hpp"
#include "ring.hpp"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (false)

namespace infinity {
namespace {

constexpr std::uint32_t kBlockBytes = 16384;
constexpr std::size_t kFileBytes = 40 * kBlockBytes + 3 * wire::kPage;
constexpr auto kDeadline = std::chrono::seconds(30);

template <typename Exception>
bool throws(const std::function<void()>& body) {
  try {
    body();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

Descriptor make_memory(std::size_t bytes) {
  Descriptor memory(::memfd_create("core_test", MFD_CLOEXEC));
  CHECK(::ftruncate(memory.get(), static_cast<off_t>(bytes)) == 0);
  return memory;
}

std::shared_ptr<Region> make_region(std::size_t bytes, bool writable = true) {
  return std::make_shared<Region>(make_memory(bytes).get(), bytes, writable);
}

void fill_random(std::span<std::byte> bytes, unsigned seed) {
  std::minstd_rand random(seed);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() >> 8);
}

void test_checksum() {
  const char digits[] = "123456789";
  CHECK(crc32c({reinterpret_cast<const std::byte*>(digits), 9}) == 0xe3069283);
  std::vector<std::byte> bytes(3 * 4096 + 100);
  fill_random(bytes, 1);
  for (std::size_t size = 0; size < bytes.size(); size += size < 80 ? 1 : 509) {
    for (std::size_t begin = 0; begin < 8; ++begin) {
      const auto part = std::span(bytes).subspan(begin, std::min(size, bytes.size() - begin));
      CHECK(crc32c(part) == crc32c_portable(part));
    }
  }
}

void test_region() {
  const auto region = make_region(10 * wire::kPage + 5);
  region->prefault(3);
  fill_random(region->slice(0, region->region_bytes()), 1);
  region->zero(5, wire::kPage);
  CHECK(region->data()[5] == std::byte{0} && region->data()[5 + wire::kPage - 1] == std::byte{0});
  CHECK(throws<std::invalid_argument>([&] { region->zero(1, region->region_bytes()); }));
  CHECK(throws<std::invalid_argument>([&] { region->slice(~std::size_t{0}, 2); }));
  CHECK(throws<std::system_error>([] { Region(make_memory(4096).get(), 8192, true); }));
  make_region(4096, false)->prefault(2);
}

void test_events() {
  const Descriptor event = Descriptor::event();
  signal_event(event.get());
  signal_event(event.get());  // readable already
  drain_event(event.get());
  pollfd state{event.get(), POLLIN, 0};
  CHECK(::poll(&state, 1, 0) == 0);
  int closed;
  {
    const Descriptor gone = Descriptor::duplicate(event.get());
    closed = gone.get();
  }
  CHECK(throws<std::system_error>([&] { signal_event(closed); }));
  CHECK(throws<std::system_error>([&] { drain_event(closed); }));
}

void test_ring() {
  const auto region = make_region(2 * wire::kPage);
  const auto [producers, consumers] = WakeSocket::make_pair();
  SubmissionRing producer(region, 64, 4, producers.get(), RingOrigin::kCreate);
  SubmissionRing consumer(region, 64, 4, consumers.get(), RingOrigin::kAttach);
  const wire::Sqe entries[4] = {{.seq = 1}, {.seq = 2}, {.seq = 3}, {.seq = 4}};
  CHECK(!consumer.pop() && consumer.prepare_sleep());
  CHECK(consumer.wait(0, -1) == WaitResult::kTimedOut);
  CHECK(producer.push(entries));
  CHECK(!producer.push({entries, 1}) && producer.num_ready() == 4);
  CHECK(consumer.wait(10'000, -1) == WaitResult::kReady);
  CHECK(consumer.pop()->seq == 1 && consumer.pop_batch(9).size() == 3);
  CHECK(producer.push({entries, 3}) && !producer.push({entries, 2}));  // all of a batch or nothing
  CHECK(consumer.pop_batch(2).size() == 2);

  auto* header = reinterpret_cast<wire::RingHeader*>(region->data() + 64);
  header->tail = 1000;  // the other process writes garbage
  CHECK(consumer.pop()->seq == 3);
  CHECK(throws<std::invalid_argument>([&] { consumer.pop(); }));
  CHECK(throws<std::invalid_argument>([&] { consumer.prepare_sleep(); }));
  header->head = 1000;
  CHECK(throws<std::invalid_argument>([&] { producer.push(entries); }));
  CHECK(throws<std::invalid_argument>(
      [&] { SubmissionRing(region, 0, 4, producers.get(), RingOrigin::kAttach); }));
  CHECK(throws<std::invalid_argument>(
      [&] { SubmissionRing(region, 0, 4, Descriptor::event().get(), RingOrigin::kCreate); }));
}

// A reactor over one temporary file and one arena whose first half is written, second half read.
class Fixture {
 public:
  Fixture(const std::string& engine, std::vector<Fault> faults = {})
      : arena_(make_region(2 * kFileBytes)), checksums_(make_region(wire::kPage)) {
    char path[] = "/tmp/core_test.XXXXXX";
    const Descriptor file(::mkostemp(path, O_CLOEXEC));
    CHECK(file.get() >= 0 && ::unlink(path) == 0);
    constexpr unsigned kQueueDepth = 4;
    reactor_ = start_reactor(std::make_shared<BenchReactor>(
        make_faulty_engine(make_engine(engine, kQueueDepth), std::move(faults)), kQueueDepth,
        kBlockBytes));
    file_ = reactor_->add_file(file.get());
    buffer_ = reactor_->add_buffer(arena_);
    fill_random(written(), 7);
  }

  std::span<std::byte> written() { return arena_->slice(0, kFileBytes); }
  std::span<std::byte> found() { return arena_->slice(kFileBytes, kFileBytes); }
  BenchReactor& reactor() { return *reactor_; }

  void submit(IoOp op, std::uint64_t tag = 0) {
    const bool read = op == IoOp::kRead;
    reactor_->submit({.tag = tag,
                      .op = op,
                      .file = file_,
                      .buffer = buffer_,
                      .buffer_offset = read ? kFileBytes : 0,
                      .num_bytes = kFileBytes,
                      .checksums = checksums_,
                      .verify = read});
  }

  // Every block of the file, last first, as one request.
  void submit_blocks(IoOp op) {
    Request request{.file = file_, .buffer = buffer_, .num_bytes = kBlockBytes};
    auto& places = request.blocks.emplace().places;
    for (std::uint64_t at = kFileBytes / kBlockBytes * kBlockBytes; at > 0;) {
      at -= kBlockBytes;
      places.push_back({op, at, op == IoOp::kRead ? kFileBytes + at : at});
    }
    reactor_->submit(std::move(request));
  }

  Completion finish() {
    const auto deadline = std::chrono::steady_clock::now() + kDeadline;
    while (std::chrono::steady_clock::now() < deadline) {
      pollfd ready{reactor_->event_fd(), POLLIN, 0};
      ::poll(&ready, 1, 1000);
      drain_event(reactor_->event_fd());
      const auto completions = reactor_->reap(1);
      if (!completions.empty()) return completions.front();
    }
    std::fprintf(stderr, "core_test: no completion in time\n");
    std::exit(1);
  }

  Completion perform(IoOp op) {
    submit(op);
    return finish();
  }

 private:
  std::shared_ptr<Region> arena_;
  std::shared_ptr<Region> checksums_;
  std::shared_ptr<BenchReactor> reactor_;
  int file_ = -1;
  int buffer_ = -1;
};

bool equal(std::span<std::byte> a, std::span<std::byte> b) {
  return std::memcmp(a.data(), b.data(), a.size()) == 0;
}

void test_round_trip(const std::string& engine) {
  Fixture fixture(engine,
                  {{"short_write", 2, 5000}, {"short_read", 3, 100}, {"errno_read", 4, EINTR}});
  CHECK(fixture.perform(IoOp::kWrite).status == IoStatus::kOk);
  CHECK(fixture.perform(IoOp::kRead).status == IoStatus::kOk);
  CHECK(equal(fixture.written(), fixture.found()));
  CHECK(fixture.reactor().stats().num_short == 2);
  CHECK(fixture.reactor().close(kDeadline));
  CHECK(throws<std::runtime_error>([&] { fixture.submit(IoOp::kWrite); }));
}

void test_blocks(const std::string& engine) {
  Fixture fixture(engine,
                  {{"short_write", 2, 5000}, {"errno_read", 4, EAGAIN}, {"errno_read", 50, EIO}});
  fixture.submit_blocks(IoOp::kWrite);
  CHECK(fixture.finish().status == IoStatus::kOk);
  fixture.submit_blocks(IoOp::kRead);
  CHECK(fixture.finish().status == IoStatus::kOk);
  constexpr std::size_t kNumBlocks = kFileBytes / kBlockBytes;
  constexpr std::size_t kWhole = kNumBlocks * kBlockBytes;
  CHECK(equal(fixture.written().first(kWhole), fixture.found().first(kWhole)));
  const auto latencies = std::make_unique<const Latencies>(fixture.reactor().latencies());
  CHECK(latencies->read.clat.num == kNumBlocks && latencies->write.lat.num == kNumBlocks);
  CHECK(latencies->write.lat.sum_ns == latencies->write.slat.sum_ns + latencies->write.clat.sum_ns);
  fixture.reactor().reset_latencies();
  fixture.submit_blocks(IoOp::kRead);
  const Completion failed = fixture.finish();
  CHECK(failed.status == IoStatus::kIoError && failed.error_number == EIO);
  CHECK(failed.offset % kBlockBytes == 0 && failed.expected == kBlockBytes);
  CHECK(fixture.reactor().close(kDeadline));
}

void test_faults(const std::string& engine) {
  Fixture fixture(engine, {{"errno_write", 5, ENOSPC}, {"flip_read", 1, 17}});
  const Completion failed = fixture.perform(IoOp::kWrite);
  CHECK(failed.status == IoStatus::kIoError && failed.error_number == ENOSPC);
  CHECK(failed.offset == 5 * kBlockBytes);
  CHECK(fixture.perform(IoOp::kWrite).status == IoStatus::kOk);
  const Completion flipped = fixture.perform(IoOp::kRead);
  CHECK(flipped.status == IoStatus::kIntegrity && flipped.offset == kBlockBytes);
  CHECK(flipped.expected != flipped.actual);
  CHECK(fixture.reactor().close(kDeadline));
}

void test_close_in_flight(const std::string& engine) {
  Fixture fixture(engine, {{"delay", 40, 100'000}});
  for (std::uint64_t tag = 0; tag < 3; ++tag) fixture.submit(IoOp::kWrite, tag);
  CHECK(!fixture.reactor().close(std::chrono::milliseconds(0)));
  CHECK(fixture.reactor().close(kDeadline));
  CHECK(fixture.reactor().reap(9).size() == 3);
  Fixture dropped(engine, {{"delay", 0, 50'000}});
  dropped.submit(IoOp::kWrite);  // the thread outlives the object, with all that it needs
}

// Moves nothing; keeps what it is told.
class RecordingEngine final : public IoEngine {
 public:
  struct Record {
    std::vector<std::span<std::byte>> pieces;  // by slot
    std::vector<Io> ios;
  };
  explicit RecordingEngine(std::shared_ptr<Record> record) : record_(std::move(record)) {}

  std::string_view name() const noexcept override { return "recording"; }
  std::size_t submit(std::span<const Io> batch) override {
    for (const Io& io : batch) record_->ios.push_back(io);
    ended_.insert(ended_.end(), batch.begin(), batch.end());
    return batch.size();
  }
  std::size_t reap(std::span<IoResult> results) override {
    std::size_t num = 0;
    for (; num < results.size() && !ended_.empty(); ended_.pop_back()) {
      results[num++] = {ended_.back().token, ended_.back().num_bytes};
    }
    return num;
  }
  void wait(int timeout_ms) override { await_event(event_.get(), timeout_ms); }
  void wake() override { signal_event(event_.get()); }
  int register_buffer(std::span<std::byte> bytes) override {
    record_->pieces.push_back(bytes);
    return static_cast<int>(record_->pieces.size()) - 1;
  }

 private:
  std::shared_ptr<Record> record_;
  std::vector<Io> ended_;
  Descriptor event_ = Descriptor::event();
};

// A region of two whole pieces and an odd one: each block names the piece that it lies in, and the
// one that lies in two names none.
void test_registered_pieces() {
  const auto record = std::make_shared<RecordingEngine::Record>();
  const auto region = make_region(2 * kRegisteredBytesMax + 3 * wire::kPage);
  const auto reactor = start_reactor(
      std::make_shared<Reactor>(std::make_unique<RecordingEngine>(record), 4, kBlockBytes));
  const Descriptor file = make_memory(wire::kPage);
  const int file_index = reactor->add_file(file.get());
  const int buffer = reactor->add_buffer(region);
  const auto& pieces = record->pieces;
  CHECK(pieces.size() == 3 && pieces[0].size() == kRegisteredBytesMax &&
        pieces[1].size() == kRegisteredBytesMax && pieces[2].size() == 3 * wire::kPage);
  CHECK(pieces[1].data() == region->data() + kRegisteredBytesMax);
  CHECK(pieces[2].data() == region->data() + 2 * kRegisteredBytesMax);
  for (const std::uint64_t piece : {1, 2}) {
    const std::uint64_t begin = piece * kRegisteredBytesMax - kBlockBytes;
    for (const std::uint64_t at : {begin, begin + wire::kPage, begin + kBlockBytes}) {
      record->ios.clear();
      const auto num_bytes = std::min<std::uint64_t>(kBlockBytes, region->region_bytes() - at);
      reactor->submit({.op = IoOp::kWrite,
                       .file = file_index,
                       .buffer = buffer,
                       .buffer_offset = at,
                       .num_bytes = num_bytes});
      while (reactor->reap(1).empty()) await_event(reactor->event_fd(), 1000);
      CHECK(record->ios.size() == 1 && record->ios[0].data == region->data() + at);
      const int expected = at == begin + wire::kPage ? kNotRegistered
                           : at == begin             ? static_cast<int>(piece) - 1
                                                     : static_cast<int>(piece);
      CHECK(record->ios[0].buffer_slot == expected);
    }
  }
  CHECK(reactor->close(kDeadline));
}

// What the posix engine was given before its end is performed: nobody asks again.
void test_queued_at_stop() {
  const Descriptor file = make_memory(0);
  std::vector<std::byte> bytes(200 * 64);
  fill_random(bytes, 3);
  {
    const auto engine = make_engine("posix", 1);
    std::vector<Io> ios;
    for (std::size_t at = 0; at < bytes.size(); at += 64) {
      ios.push_back({.op = IoOp::kWrite,
                     .fd = file.get(),
                     .data = bytes.data() + at,
                     .num_bytes = 64,
                     .offset = at});
    }
    CHECK(engine->submit(ios) == ios.size());
  }
  std::vector<std::byte> found(bytes.size());
  CHECK(::pread(file.get(), found.data(), found.size(), 0) == static_cast<ssize_t>(found.size()));
  CHECK(equal(bytes, found));
}

// The smallest read that moves anything is flipped, too.
void test_flip_of_one_byte() {
  const Descriptor file = make_memory(0);
  CHECK(::pwrite(file.get(), "a", 1, 0) == 1);
  const auto engine = make_faulty_engine(make_engine("posix", 1), {{"flip_read", 0, 0}});
  std::byte found{0};
  const Io io{.fd = file.get(), .data = &found, .num_bytes = 1, .token = 5};
  CHECK(engine->submit({&io, 1}) == 1);
  IoResult result;
  while (engine->reap({&result, 1}) == 0) engine->wait(1000);
  CHECK(result.token == 5 && result.result == 1);
  CHECK(found == static_cast<std::byte>('a' ^ 1));
}

// An engine that fails as a whole: what ended before is reported, what is in flight is not, and its
// memory stays where it is.
void test_breakdown(const std::string& engine) {
  auto region = make_region(2 * kFileBytes);
  const std::weak_ptr<Region> seen = region;
  const Descriptor file = make_memory(2 * kFileBytes);
  auto reactor = start_reactor(std::make_shared<Reactor>(
      make_faulty_engine(make_engine(engine, 4), {{"delay", 1, 60'000'000}, {"break", 2, ENODEV}}),
      4, kBlockBytes));
  const int file_index = reactor->add_file(file.get());
  const int buffer = reactor->add_buffer(std::move(region));
  const auto submit = [&](std::uint64_t tag) {
    reactor->submit({.tag = tag, .file = file_index, .buffer = buffer, .num_bytes = kBlockBytes});
  };
  submit(1);
  std::vector<Completion> ended;
  while (ended.empty()) {
    await_event(reactor->event_fd(), 1000);
    ended = reactor->reap(9);
  }
  CHECK(ended.size() == 1 && ended[0].tag == 1 && ended[0].status == IoStatus::kOk);
  submit(2);
  submit(3);
  CHECK(!reactor->close(kDeadline));  // at once
  CHECK(throws<std::system_error>([&] { reactor->reap(9); }));
  CHECK(throws<std::system_error>([&] { submit(4); }));
  CHECK(throws<std::runtime_error>([&] { reactor->remove_buffer(buffer); }));
  reactor.reset();
  CHECK(!seen.expired());
}

}  // namespace
}  // namespace infinity

int main() {
  using namespace infinity;
  test_checksum();
  test_region();
  test_events();
  test_ring();
  test_registered_pieces();
  test_queued_at_stop();
  test_flip_of_one_byte();
  for (const std::string& engine : engine_names()) {
    if (const auto why_not = probe_engine(engine)) {
      std::printf("core_test: %s left out: %s\n", engine.c_str(), why_not->c_str());
      continue;
    }
    test_round_trip(engine);
    test_blocks(engine);
    test_faults(engine);
    test_close_in_flight(engine);
    test_breakdown(engine);
    std::printf("core_test: %s passed\n", engine.c_str());
  }
}

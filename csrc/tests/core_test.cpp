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

#include "checksum.hpp"
#include "descriptor.hpp"
#include "reactor.hpp"
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

void test_ring() {
  const auto region = make_region(2 * wire::kPage);
  const Descriptor event = Descriptor::event();
  SubmissionRing producer(region, 64, 4, event.get(), RingOrigin::kCreate);
  SubmissionRing consumer(region, 64, 4, event.get(), RingOrigin::kAttach);
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
      [&] { SubmissionRing(region, 0, 4, event.get(), RingOrigin::kAttach); }));
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
    reactor_ = std::make_unique<Reactor>(
        make_faulty_engine(make_engine(engine, kQueueDepth), std::move(faults)), kQueueDepth,
        kBlockBytes);
    file_ = reactor_->add_file(file.get());
    buffer_ = reactor_->add_buffer(arena_);
    fill_random(written(), 7);
  }

  std::span<std::byte> written() { return arena_->slice(0, kFileBytes); }
  std::span<std::byte> found() { return arena_->slice(kFileBytes, kFileBytes); }
  Reactor& reactor() { return *reactor_; }

  void submit(IoOp op, std::uint64_t tag = 0) {
    const bool read = op == IoOp::kRead;
    if (op == IoOp::kFsync) return reactor_->submit({.tag = tag, .op = op, .file = file_});
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
    for (std::uint64_t at = kFileBytes / kBlockBytes * kBlockBytes; at > 0;) {
      at -= kBlockBytes;
      request.blocks.push_back({op, at, op == IoOp::kRead ? kFileBytes + at : at});
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
  std::unique_ptr<Reactor> reactor_;
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
  CHECK(fixture.perform(IoOp::kFsync).status == IoStatus::kOk);
  CHECK(fixture.perform(IoOp::kRead).status == IoStatus::kOk);
  CHECK(equal(fixture.written(), fixture.found()));
  CHECK(fixture.reactor().stats().num_short == 2);
  CHECK(fixture.reactor().close(kDeadline));
  CHECK(throws<std::runtime_error>([&] { fixture.submit(IoOp::kFsync); }));
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

}  // namespace
}  // namespace infinity

int main() {
  using namespace infinity;
  test_checksum();
  test_region();
  test_ring();
  for (const std::string& engine : engine_names()) {
    if (const auto why_not = probe_engine(engine)) {
      std::printf("core_test: %s left out: %s\n", engine.c_str(), why_not->c_str());
      continue;
    }
    test_round_trip(engine);
    test_blocks(engine);
    test_faults(engine);
    test_close_in_flight(engine);
    std::printf("core_test: %s passed\n", engine.c_str());
  }
}

// Two sides hand one entry to and fro over two rings. One of them sleeps for each entry; the other
// stays awake and answers within a random few hundred nanoseconds, so that its push meets every
// point of the sleeper's way to sleep. They change roles every few thousand rounds. As only one
// entry is under way, a lost wake-up stays lost: it shows as a wait that lasts until the watchdog's
// deadline, and fails the run. (With the sleep flag stored and loaded instead of exchanged, this
// program fails within seconds on x86-64.)
//
//   ring_stress [--handovers N] [--threads] [--seed S]
//
// Two processes by default; two threads for ThreadSanitizer, which sees one process only.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "descriptor.hpp"
#include "ring.hpp"

namespace infinity {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWatchdogMs = 20'000;
constexpr std::uint64_t kRoundsPerRole = 4096;
constexpr std::size_t kEntries = 8;
constexpr std::size_t kRingBytes = 4096;

struct Settings {
  std::uint64_t num_handovers = 10'000'000;
  bool threads = false;
  unsigned seed = 1;
};

// One of the two sides. Both rings lie in the same region; each side attaches rings of its own.
class Side {
 public:
  Side(const std::shared_ptr<Region>& region, const Descriptor& wake, int index, unsigned seed)
      : in_(region, static_cast<std::size_t>(index) * kRingBytes, kEntries, wake.get(),
            RingOrigin::kAttach),
        out_(region, static_cast<std::size_t>(1 - index) * kRingBytes, kEntries, wake.get(),
             RingOrigin::kAttach),
        random_(seed + static_cast<unsigned>(index)) {}

  void send(std::uint64_t seq) {
    for (auto spins = random_() % 512; spins > 0; --spins) asm volatile("" ::: "memory");
    const wire::Sqe entry{.seq = seq, .arg = ~seq};
    if (!out_.push({&entry, 1})) fail("ring full", seq);
  }

  void receive_asleep(std::uint64_t seq) {
    if (in_.num_ready() == 0) ++num_sleeps_;
    const auto begin = Clock::now();
    WaitResult result;
    do {
      result = in_.wait(kWatchdogMs, -1);
    } while (result == WaitResult::kInterrupted);
    // An entry that is found only when the time is up has been slept over.
    const bool late = Clock::now() - begin >= std::chrono::milliseconds(kWatchdogMs);
    if (late || result != WaitResult::kReady) fail("lost wake-up", seq);
    expect(in_.pop(), seq);
  }

  void receive_awake(std::uint64_t seq) {
    const auto deadline = Clock::now() + 2 * std::chrono::milliseconds(kWatchdogMs);
    for (std::uint64_t spins = 1;; ++spins) {
      if (const auto entry = in_.pop()) return expect(entry, seq);
      if (spins % 4096 != 0) continue;
      if (Clock::now() > deadline) fail("no answer", seq);
      std::this_thread::yield();  // the sleeper may need this core
    }
  }

  // Of the entries waited for asleep, those that were not there yet at the first look.
  std::uint64_t num_sleeps() const { return num_sleeps_; }

 private:
  void expect(const std::optional<wire::Sqe>& entry, std::uint64_t seq) const {
    if (!entry || entry->seq != seq || entry->arg != ~seq) fail("wrong entry", seq);
  }

  [[noreturn]] void fail(const char* what, std::uint64_t seq) const {
    std::fprintf(stderr, "ring_stress: %s at hand-over %llu\n", what,
                 static_cast<unsigned long long>(seq));
    std::_Exit(1);
  }

  SubmissionRing in_;
  SubmissionRing out_;
  std::minstd_rand random_;
  std::uint64_t num_sleeps_ = 0;
};

void receive(Side& side, std::uint64_t seq, bool asleep) {
  asleep ? side.receive_asleep(seq) : side.receive_awake(seq);
}

void serve(Side& side, std::uint64_t num_rounds) {
  for (std::uint64_t round = 0; round < num_rounds; ++round) {
    receive(side, 2 * round, round / kRoundsPerRole % 2 == 0);
    side.send(2 * round + 1);
  }
}

void drive(Side& side, std::uint64_t num_rounds) {
  for (std::uint64_t round = 0; round < num_rounds; ++round) {
    side.send(2 * round);
    receive(side, 2 * round + 1, round / kRoundsPerRole % 2 == 1);
  }
}

// Runs `body` beside `drive`, as a thread or as a process; returns true if both went well.
template <typename Body, typename Drive>
bool run_beside(bool threads, Body body, Drive drive_body) {
  if (threads) {
    std::jthread other(body);
    drive_body();
    return true;
  }
  const pid_t child = ::fork();
  if (child < 0) return false;
  if (child == 0) {
    body();
    std::_Exit(0);
  }
  drive_body();
  int status = 0;
  return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int run(const Settings& settings) {
  const Descriptor memory(::memfd_create("ring_stress", MFD_CLOEXEC));
  if (::ftruncate(memory.get(), 2 * kRingBytes) != 0) return 1;
  const auto region = std::make_shared<Region>(memory.get(), 2 * kRingBytes, true);
  const auto [ours, theirs] = WakeSocket::make_pair();
  for (std::size_t i = 0; i < 2; ++i) {
    const SubmissionRing format(region, i * kRingBytes, kEntries, ours.get(), RingOrigin::kCreate);
  }
  Side driver(region, ours, 0, settings.seed);
  Side server(region, theirs, 1, settings.seed);

  const auto begin = Clock::now();
  const bool well = run_beside(
      settings.threads, [&] { serve(server, settings.num_handovers); },
      [&] { drive(driver, settings.num_handovers); });
  const std::chrono::duration<double> took = Clock::now() - begin;
  if (!well) return 1;
  const auto num_handovers = static_cast<double>(settings.num_handovers);
  std::printf(
      "ring_stress: %.0f hand-overs to a sleeper between two %s, at least %.1f%% of them not there "
      "at its first look, no lost wake-up; %.1f s, %.0f a second, seed %u\n",
      num_handovers, settings.threads ? "threads" : "processes",
      100 * static_cast<double>(driver.num_sleeps() + server.num_sleeps()) / num_handovers,
      took.count(), num_handovers / took.count(), settings.seed);
  return 0;
}

}  // namespace
}  // namespace infinity

int main(int argc, char** argv) {
  infinity::Settings settings;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--threads") == 0) {
      settings.threads = true;
    } else if (std::strcmp(argv[i], "--handovers") == 0 && i + 1 < argc) {
      settings.num_handovers = std::strtoull(argv[++i], nullptr, 10);
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      settings.seed = static_cast<unsigned>(std::strtoul(argv[++i], nullptr, 10));
    } else {
      std::fprintf(stderr, "usage: ring_stress [--handovers N] [--threads] [--seed S]\n");
      return 2;
    }
  }
  return infinity::run(settings);
}

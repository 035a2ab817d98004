// Two sides hand one entry to and fro over two rings and sleep in between, so that every hand-over
// races a push against the other side's going to sleep. A lost wake-up leaves both asleep for ever:
// it shows as a wait that lasts until the watchdog's deadline, and fails the run.
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
constexpr std::size_t kEntries = 8;
constexpr std::size_t kRingBytes = 4096;

struct Settings {
  std::uint64_t num_handovers = 10'000'000;
  bool threads = false;
  unsigned seed = 1;
};

struct Tally {
  std::uint64_t num_received = 0;
  std::uint64_t num_sleeps = 0;
};

// One of the two sides. Both rings lie in the same region; each side attaches rings of its own.
class Side {
 public:
  Side(const std::shared_ptr<Region>& region, const Descriptor (&events)[2], int index,
       unsigned seed)
      : in_(region, static_cast<std::size_t>(index) * kRingBytes, kEntries, events[index].get(),
            RingOrigin::kAttach),
        out_(region, static_cast<std::size_t>(1 - index) * kRingBytes, kEntries,
             events[1 - index].get(), RingOrigin::kAttach),
        random_(seed + static_cast<unsigned>(index)) {}

  void send(std::uint64_t seq) {
    linger();
    const wire::Sqe entry{.seq = seq, .arg = ~seq};
    if (!out_.push({&entry, 1})) fail("ring full", seq);
  }

  void receive(std::uint64_t seq) {
    linger();
    if (in_.num_ready() == 0) ++tally_.num_sleeps;
    const auto begin = Clock::now();
    WaitResult result;
    do {
      result = in_.wait(kWatchdogMs, -1);
    } while (result == WaitResult::kInterrupted);
    // An entry that is found only when the time is up has been slept over.
    const bool late = Clock::now() - begin >= std::chrono::milliseconds(kWatchdogMs);
    if (late || result != WaitResult::kReady) fail("lost wake-up", seq);
    const auto entry = in_.pop();
    if (!entry || entry->seq != seq || entry->arg != ~seq) fail("wrong entry", seq);
    ++tally_.num_received;
  }

  const Tally& tally() const { return tally_; }

 private:
  // A pause of random length moves the push across every point of the other side's way to sleep.
  void linger() {
    for (auto spins = random_() % 256; spins > 0; --spins) asm volatile("" ::: "memory");
  }

  [[noreturn]] void fail(const char* what, std::uint64_t seq) const {
    std::fprintf(stderr, "ring_stress: %s at hand-over %llu\n", what,
                 static_cast<unsigned long long>(seq));
    std::_Exit(1);
  }

  SubmissionRing in_;
  SubmissionRing out_;
  std::minstd_rand random_;
  Tally tally_;
};

void serve(Side& side, std::uint64_t num_rounds) {
  for (std::uint64_t seq = 0; seq < num_rounds; ++seq) {
    side.receive(2 * seq);
    side.send(2 * seq + 1);
  }
}

void drive(Side& side, std::uint64_t num_rounds) {
  for (std::uint64_t seq = 0; seq < num_rounds; ++seq) {
    side.send(2 * seq);
    side.receive(2 * seq + 1);
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
  const Descriptor events[2] = {Descriptor::event(), Descriptor::event()};
  for (std::size_t i = 0; i < 2; ++i) {
    const SubmissionRing format(region, i * kRingBytes, kEntries, events[i].get(),
                                RingOrigin::kCreate);
  }
  Side driver(region, events, 0, settings.seed);
  Side server(region, events, 1, settings.seed);
  const std::uint64_t num_rounds = settings.num_handovers / 2;

  const auto begin = Clock::now();
  const bool well = run_beside(
      settings.threads, [&] { serve(server, num_rounds); }, [&] { drive(driver, num_rounds); });
  const std::chrono::duration<double> took = Clock::now() - begin;
  if (!well || driver.tally().num_received != num_rounds) return 1;
  std::printf(
      "ring_stress: %llu hand-overs between two %s, %.1f%% of them into an empty ring, no lost "
      "wake-up, %.1f s, %.0f hand-overs/s, seed %u\n",
      static_cast<unsigned long long>(2 * num_rounds), settings.threads ? "threads" : "processes",
      100.0 * static_cast<double>(driver.tally().num_sleeps) / static_cast<double>(num_rounds),
      took.count(), static_cast<double>(2 * num_rounds) / took.count(), settings.seed);
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

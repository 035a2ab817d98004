#include "reactor.hpp"

#include <sys/types.h>
#include <unistd.h>

#include "error.hpp"
#include "reactor_core.hpp"
#include "thread.hpp"

namespace infinity {

Reactor::Reactor(std::unique_ptr<IoEngine> engine, unsigned queue_depth, std::uint32_t block_bytes)
    : core_(std::make_shared<ReactorCore>(std::move(engine), queue_depth, block_bytes)),
      owner_pid_(::getpid()) {
  start_thread("io-reactor", [core = core_] { core->run(); }).detach();
}

Reactor::~Reactor() {
  if (::getpid() == owner_pid_) core_->begin_close();
}

int Reactor::event_fd() const noexcept { return core_->event_fd(); }
std::string Reactor::engine_name() const { return core_->engine_name(); }
int Reactor::add_file(int fd) { return core_->add_file(fd); }
void Reactor::remove_file(int index) { core_->remove_file(index); }
int Reactor::add_buffer(std::shared_ptr<Region> region) {
  return core_->add_buffer(std::move(region));
}
void Reactor::remove_buffer(int index) { core_->remove_buffer(index); }

void Reactor::submit(Request request) {
  if (::getpid() != owner_pid_) throw std::runtime_error("the reactor belongs to another process");
  core_->submit(std::move(request));
}

std::vector<Completion> Reactor::reap(std::size_t completions_max) {
  return core_->reap(completions_max);
}

ReactorStats Reactor::stats() const { return core_->stats(); }
Latencies Reactor::latencies() const { return core_->latencies(); }
Histogram Reactor::clat() const { return core_->clat(); }
void Reactor::reset_latencies() { core_->reset_latencies(); }

bool Reactor::close(std::chrono::milliseconds timeout) {
  if (::getpid() != owner_pid_) return true;  // the thread did not come along
  core_->begin_close();
  return core_->wait_closed(timeout);
}

}  // namespace infinity

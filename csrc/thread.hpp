// Starts a named thread that takes no signals: they belong to the program's main thread.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

#include "error.hpp"

namespace infinity {

template <typename Body>
std::thread start_thread(const char* name, Body body) {
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  struct Restore {
    sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&previous};
  std::thread thread;
  try {
    thread = std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw_errno(error.code().value(),
                "start a thread (raise ulimit -u, ulimit -v, or the container's pids.max)");
  }
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace infinity

// A bound for a call that meets other ranks, knows no bound of its own and must be made by the rank's own thread:
// MPI_Init, MPI_Finalize. What may run on another thread has comm/liveness/bounded_call.h.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace moebius {

class CallWatchdog {
 public:
  // Where this object lives for longer than `seconds` (comm/liveness/stall_aware_deadline.h), on_late is called once, on a thread of it: to
  // say so and end the process, since the call cannot be left.
  CallWatchdog(double seconds, std::function<void()> on_late);
  ~CallWatchdog();
  CallWatchdog(const CallWatchdog&) = delete;

 private:
  void watch(double seconds);

  std::mutex mutex_;
  std::condition_variable returned_;
  bool has_returned_ = false;
  std::function<void()> on_late_;
  std::thread watcher_;  // the last: it uses the others
};

}  // namespace moebius

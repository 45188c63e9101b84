// A watchdog for a call that waits for other ranks, has no timeout of its own, and must be made by
// the rank's own thread: MPI_Init, MPI_Finalize. A call that may run on another thread uses
// comm/liveness/bounded_call.h.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace moebius {

class CallWatchdog {
 public:
  // Calls on_late once, on a thread of its own, when this object exists for longer than `seconds`
  // (by comm/liveness/stall_aware_deadline.h).
  // on_late reports it and ends the process, since the call cannot be interrupted.
  CallWatchdog(double seconds, std::function<void()> on_late);
  ~CallWatchdog();
  CallWatchdog(const CallWatchdog&) = delete;

 private:
  void watch(double seconds);

  std::mutex mutex_;
  std::condition_variable returned_;
  bool has_returned_ = false;
  std::function<void()> on_late_;
  std::thread watcher_;  // the last member, since it uses the others
};

}  // namespace moebius

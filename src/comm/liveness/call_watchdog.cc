#include "comm/liveness/call_watchdog.h"

#include <chrono>

#include "comm/liveness/stall_aware_deadline.h"
#include "core/start_thread.h"

namespace moebius {

CallWatchdog::CallWatchdog(double seconds, std::function<void()> on_late)
    : on_late_(std::move(on_late)),
      watcher_(start_thread([&] { return std::thread([this, seconds] { watch(seconds); }); })) {}

CallWatchdog::~CallWatchdog() {
  {
    const std::lock_guard lock(mutex_);
    has_returned_ = true;
  }
  returned_.notify_one();
  watcher_.join();
}

void CallWatchdog::watch(double seconds) {
  std::unique_lock lock(mutex_);
  StallAwareDeadline deadline(seconds);
  while (!has_returned_) {
    if (deadline.is_over()) return on_late_();
    returned_.wait_for(lock, std::chrono::milliseconds(deadline.milliseconds_to_sleep()));
  }
}

}  // namespace moebius

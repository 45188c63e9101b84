#include "comm/liveness/call_limit.h"

#include <chrono>

#include "comm/liveness/patience.h"

namespace moebius {

CallLimit::CallLimit(double seconds, std::function<void()> on_late)
    : on_late_(std::move(on_late)), watcher_([this, seconds] { watch(seconds); }) {}

CallLimit::~CallLimit() {
  {
    const std::lock_guard lock(mutex_);
    has_returned_ = true;
  }
  returned_.notify_one();
  watcher_.join();
}

void CallLimit::watch(double seconds) {
  std::unique_lock lock(mutex_);
  Patience patience(seconds);
  while (!has_returned_) {
    if (patience.is_over()) return on_late_();
    returned_.wait_for(lock, std::chrono::milliseconds(patience.milliseconds_to_sleep()));
  }
}

}  // namespace moebius

// For how long something is waited for. While a process stands (SIGSTOP, a job that is suspended) it does not wait, and
// must not accuse others of it when it goes on.
#pragma once

#include <algorithm>
#include <chrono>

#include "comm/transport/socket.h"

namespace moebius {

class StallAwareDeadline {
 public:
  // Two questions that are further apart: the process stood in between.
  static constexpr double kStoppedS = 1;

  explicit StallAwareDeadline(double seconds) : last_(Clock::now()), until_(deadline_in(seconds)) {}

  // REQUIRES: is asked at least every half a kStoppedS.
  bool is_over() {
    const Clock::time_point now = Clock::now();
    if (now - last_ > std::chrono::duration<double>(kStoppedS)) until_ += now - last_;
    last_ = now;
    return now >= until_;
  }
  // For which nobody need ask.
  int milliseconds_to_sleep() const { return std::min(static_cast<int>(kStoppedS * 500), milliseconds_until(until_)); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
  Deadline until_;
};

}  // namespace moebius

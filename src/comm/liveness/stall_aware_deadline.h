// A deadline that does not count the time during which this process was stopped (SIGSTOP, a
// suspended job). A process that was stopped has not waited, and must not accuse other ranks
// when it continues.
#pragma once

#include <algorithm>
#include <chrono>

#include "comm/transport/socket.h"

namespace moebius {

class StallAwareDeadline {
 public:
  // When two calls of is_over are further apart, the process was stopped in between.
  static constexpr double kStoppedGapS = 1;

  explicit StallAwareDeadline(double seconds) : last_(Clock::now()), until_(deadline_in(seconds)) {}

  // REQUIRES: is called at least every half kStoppedGapS.
  bool is_over() {
    const Clock::time_point now = Clock::now();
    if (now - last_ > std::chrono::duration<double>(kStoppedGapS)) until_ += now - last_;
    last_ = now;
    return now >= until_;
  }
  // Returns for how long the caller may sleep before it calls is_over again.
  int milliseconds_to_sleep() const {
    return std::min(static_cast<int>(kStoppedGapS * 500), milliseconds_until(until_));
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
  Deadline until_;
};

}  // namespace moebius

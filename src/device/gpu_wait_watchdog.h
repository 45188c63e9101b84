// A watchdog for the host's waits for its GPU, kept in Accelerator::state.
// A GPU may wait for other ranks, and these may have ended.
#pragma once

#include <functional>

namespace moebius {

struct GpuWaitWatchdog {
  // Called repeatedly while the host waits, with the seconds waited so far. It may throw to end the
  // wait. Without it a wait has no limit.
  std::function<void(double waited_s)> check;
  // Called when the GPU has done what was waited for. It throws when that work reports a failure. May be empty.
  std::function<void()> ended;
};

}  // namespace moebius

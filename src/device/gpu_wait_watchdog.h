// What looks after the waits of a host for its GPU, kept in Accelerator::state:
// a GPU may wait for others, which may have ended.
#pragma once

#include <functional>

namespace moebius {

struct GpuWaitWatchdog {
  // Called again and again while the host waits, with the seconds that it has; throws to end the wait. None: the wait
  // takes as long as it takes.
  std::function<void(double waited_s)> look;
};

}  // namespace moebius

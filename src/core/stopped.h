// The end of long work that a user asked for, as with Ctrl-C.
#pragma once

#include <exception>
#include <functional>

namespace moebius {

// Work throws this when its ShouldStop returned true. No unfinished file or folder of the work is left.
struct Stopped : std::exception {
  const char* what() const noexcept override { return "stopped, as a signal asked for"; }
};

// Work asks this from time to time; true asks it to end with Stopped. Empty: the work is never asked to end.
using ShouldStop = std::function<bool()>;

inline void throw_if_stopped(const ShouldStop& should_stop) {
  if (should_stop && should_stop()) throw Stopped();
}

}  // namespace moebius

// Commands that a signal ends before their files are complete.
#pragma once

#include "cli/command.h"
#include "core/stopped.h"

namespace moebius {

// Returns what work of a command asks: whether a signal came.
inline ShouldStop stop_on_signal(const Cli& cli) {
  return [&cli] { return cli.signal != 0; };
}

// Runs work and returns its exit code. Where it ended with Stopped, returns 128 + the signal, and logs that there is
// no `result`: "a dataset".
template <class Work>
int run_until_signal(Cli& cli, const char* result, const Work& work) {
  try {
    return work();
  } catch (const Stopped&) {
    cli.log.info("signal {}: ended without {}", cli.signal.load(), result);
    return 128 + cli.signal;
  }
}

}  // namespace moebius

// Fault points: named places where a test can make a process die or fail, to prove that nothing is lost when it does.
//
// The body is chosen when a program is linked: `moebius` links fault_points_none.cc, where a point does nothing; the
// tests and the program `moebius_faults` link fault_points.cc, which reads, once (the one exception to the rule that
// only cli reads the environment, in code that no user runs):
//   MOEBIUS_FAULT=NAME:COUNT         the COUNT-th time that point NAME is reached, SIGKILL to this process
//   MOEBIUS_FAULT=NAME:COUNT:stop    instead, SIGSTOP: the process stands still
//   MOEBIUS_FAULT=NAME:COUNT:throw   instead, Error{io} as of a failed write
//   MOEBIUS_FAULT=NAME:COUNT:enospc  from the COUNT-th time on, Error{io} as of a full disk
//   MOEBIUS_FAULT_LOG=FILE           the names of the points reached, a line each: how a test finds all there are
#pragma once

namespace moebius {

// A name is lower-case words joined by dots, "checkpoint.manifest.rename". Any thread.
void fault_point(const char* name);

}  // namespace moebius

// A fault point is a named place where a test can make a process die or fail.
// Tests use fault points to prove that nothing is lost at that moment.
//
// The body of fault_point is chosen when a program is linked:
//   moebius                     links fault_points_none.cc, where a point does nothing
//   the tests, moebius_faults   link fault_points.cc, which reads the two variables below once
// This is the one exception to the rule that only cli reads the environment; no user runs this code.
//   MOEBIUS_FAULT=NAME:COUNT         SIGKILL when point NAME is reached for the COUNT-th time
//   MOEBIUS_FAULT=NAME:COUNT:stop    SIGSTOP instead: the process is stopped
//   MOEBIUS_FAULT=NAME:COUNT:throw   Error{io} instead, like a failed write
//   MOEBIUS_FAULT=NAME:COUNT:enospc  from the COUNT-th time on: Error{io}, like a full disk
//   MOEBIUS_FAULT=NAME:COUNT:nomem   std::bad_alloc instead, as without memory
//   MOEBIUS_FAULT=NAME:COUNT:nomem_noexcept  std::bad_alloc where nothing may be thrown, as in a destructor of JSON
//   MOEBIUS_FAULT_LOG=FILE           appends the name of each point reached, one per line: a list of all points
#pragma once

namespace moebius {

// May be called from any thread. A name is lower-case words joined by dots:
// "checkpoint.manifest.rename".
void fault_point(const char* name);

}  // namespace moebius

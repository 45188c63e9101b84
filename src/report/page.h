// The page of a run, or of several side by side: one HTML file without references to any other.
#pragma once

#include <string>
#include <vector>

#include "report/run_data.h"

namespace moebius {

struct ShownRun {
  std::string name, path;
  const RunData& data;
  double modified_s = 0;  // when its metrics were last written, seconds since 1970; 0: never
  int colour = 0;         // 0 to 7
};

inline constexpr size_t kMostRuns = 8;  // on a page: each has a colour

struct PageTime {
  double now_s = 0;     // seconds since 1970
  int period_ms = 0;    // how often a page that is served asks for news; 0: a file
  std::string version;  // of what is served
};

// Returns the whole file. REQUIRES: 1 to kMostRuns runs.
std::string page_of(const std::vector<ShownRun>& runs, const PageTime& time);
// Returns the part that changes on a page that is followed: the contents of its element "page".
std::string page_body_of(const std::vector<ShownRun>& runs, const PageTime& time);
// Returns the header Content-Security-Policy that lets the page run its own script alone.
std::string content_policy(const PageTime& time);

}  // namespace moebius

// The page of one run, or of several runs side by side: one HTML file that refers to no other file.
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

inline constexpr size_t kMaxRuns = 8;  // runs on one page, since each has its own colour

struct PageTime {
  double now_s = 0;     // seconds since 1970
  int period_ms = 0;    // how often a served page polls for changes; 0: a file, which does not poll
  std::string version;  // version of the served data
};

// Returns the whole file. REQUIRES: 1 to kMaxRuns runs.
std::string page_of(const std::vector<ShownRun>& runs, const PageTime& time);
// Returns the part that changes while a page is served: the contents of its element "page".
std::string page_body_of(const std::vector<ShownRun>& runs, const PageTime& time);
// Returns the header Content-Security-Policy, which allows only the page's own script.
std::string content_policy(const PageTime& time);

}  // namespace moebius

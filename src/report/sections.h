// The sections of the page. Each function returns markup, which is empty if no run has data for it.
#pragma once

#include <string>
#include <vector>

#include "report/page.h"

namespace moebius {

using Runs = std::vector<ShownRun>;

std::string learning_section(const Runs& runs);
std::string speed_section(const Runs& runs);
std::string experts_section(const Runs& runs);
std::string memory_section(const Runs& runs);
std::string ranks_section(const Runs& runs);
std::string history_section(const Runs& runs);
std::string recipe_section(const Runs& runs);
std::string other_section(const Runs& runs);  // metrics that no other section shows

// Returns a section with a heading and figures; empty without figures.
std::string section_of(const std::string& title, const std::string& figures);
// The first returns " of RUN" if there are several runs; the second a suffix for ids that is unique to this run.
std::string of_run(const Runs& runs, const ShownRun& run);
std::string id_of(const std::string& name, const ShownRun& run);

// The progress of a run, such as "step 5 of 10, running" or "step 7 of 10, signal 15 at step 7".
struct RunState {
  std::string text;
  bool is_bad = false;
};
RunState state_of(const ShownRun& run, double now_s);

}  // namespace moebius

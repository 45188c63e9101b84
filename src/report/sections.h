// The sections of the page. Each returns markup; empty where no run has anything for it.
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
std::string other_section(const Runs& runs);  // metrics that no other section knows

// Returns a heading and figures, empty without figures.
std::string section_of(const std::string& title, const std::string& figures);
// " of RUN" where there are several; an id's end that is this run's own.
std::string of_run(const Runs& runs, const ShownRun& run);
std::string id_of(const std::string& name, const ShownRun& run);

// The progress of a run: "step 5 of 10, running", "step 7 of 10, signal 15 at step 7".
struct RunState {
  std::string text;
  bool is_bad = false;
};
RunState state_of(const ShownRun& run, double now_s);

}  // namespace moebius

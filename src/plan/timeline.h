// A predicted step as a Chrome trace (open it in Perfetto), and as a self-contained HTML page.
#pragma once

#include <string>

#include "plan/predict.h"

namespace moebius {

// Returns {"traceEvents": [...]} in microseconds. Process 0, "passes", has a row for each pipeline rank: its passes,
// then the slowest rank's phases after the passes. Process 1, "communication", has a row for each pipeline rank and
// axis that it sends on. The args of its events have the bytes, and the part of the time that overlaps with compute.
// The exchanges of a pass are shown one after another up to its end, and those of gradients and weights around the
// end of the passes. Steps of many micro-batches show as many as are simulated.
std::string plan_trace(const Prediction& p);
// Returns the timeline of the pipeline, the phases, and each rank's memory by life. `text` is the plan's text.
std::string plan_html(const Prediction& p, const std::string& title, const std::string& text);

}  // namespace moebius

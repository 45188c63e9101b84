// A predicted step as a Chrome trace (open it in Perfetto), and as a self-contained HTML page.
#pragma once

#include <string>

#include "plan/predict.h"

namespace moebius {

// Returns {"traceEvents": [...]}: a line for each pipeline rank with its passes, in microseconds; then the
// slowest rank's phases after the passes. Steps of many micro-batches show as many as are simulated.
std::string plan_trace(const Prediction& p);
// Returns the timeline of the pipeline, the phases, and each rank's memory by life. `text` is the plan's text.
std::string plan_html(const Prediction& p, const std::string& title, const std::string& text);

}  // namespace moebius

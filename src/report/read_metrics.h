// Reads lines of metrics.jsonl and events.jsonl into a run's data.
// A line that is damaged or hostile is counted and left out; no line is an error.
#pragma once

#include <memory>
#include <string_view>

#include "report/run_data.h"

namespace moebius {

class MetricsReader {
 public:
  explicit MetricsReader(RunData& run);  // run: outlives it
  ~MetricsReader();

  static constexpr int64_t kPadding = 64;
  // line: without its end. kPadding bytes after it must be readable.
  void add_metrics_line(std::string_view line);
  void add_event_line(std::string_view line);

 private:
  class Parser;
  RunData& run_;
  std::unique_ptr<Parser> parser_;
};

}  // namespace moebius

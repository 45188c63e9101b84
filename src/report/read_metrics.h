// Reads lines of metrics.jsonl and events.jsonl into a run's data.
// A corrupt or hostile line is counted and skipped; no line is an error.
#pragma once

#include <memory>
#include <string_view>

#include "report/run_data.h"

namespace moebius {

class MetricsReader {
 public:
  explicit MetricsReader(RunData& run);  // `run` must outlive it
  ~MetricsReader();

  static constexpr int64_t kPadding = 64;
  // line: without its line break. kPadding bytes after it must be readable.
  void add_metrics_line(std::string_view line);
  void add_event_line(std::string_view line);

 private:
  class Parser;
  RunData& run_;
  std::unique_ptr<Parser> parser_;
};

}  // namespace moebius

// JSON, one object a line: a log that survives a crash, and its cutting back when a run resumes.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "io/files.h"

namespace moebius {

class JsonlWriter {
 public:
  explicit JsonlWriter(const std::string& path);  // appends; creates the file if missing
  // One line in one system call, visible to readers at once. Doubles round-trip; NaN and Inf become null.
  void append(const nlohmann::ordered_json& record);

 private:
  File file_;
};

// Drops the records whose "step" is above `step`, and a last line that a crash cut short; records without a step stay.
// Replaces the file as a whole, and only when something goes. A missing file is fine. Error{input} with file:line for
// another bad line.
void truncate_jsonl_after(const std::string& path, int64_t step);

}  // namespace moebius

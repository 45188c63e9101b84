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
  // Returns once the lines written so far are on the device: before a checkpoint that a resume will trim the log to.
  void sync() const { file_.sync(); }

 private:
  File file_;
};

// Drops the records whose "step" is above `step`; records without a step stay. Drops damaged lines too and returns
// their number: a last line that a crash cut short, and lines that are no JSON object, as a power loss leaves them
// (often NUL bytes). Replaces the file as a whole, and only when something goes. A missing file is fine.
int64_t truncate_jsonl_after(const std::string& path, int64_t step);

}  // namespace moebius

// A log of JSON objects, one on each line. It survives a crash, and is truncated when
// a run resumes.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "io/files.h"

namespace moebius {

class JsonlWriter {
 public:
  explicit JsonlWriter(const std::string& path);  // appends; creates the file if missing
  // Writes one line in one system call, visible to readers at once. Doubles round-trip. NaN and Inf
  // become null.
  void append(const nlohmann::ordered_json& record);
  // Returns once all lines written so far are on the device. It is called before a checkpoint is
  // written, because a resume truncates the log to the checkpoint.
  void sync() const { file_.sync(); }

 private:
  File file_;
};

// Drops the records whose "step" is above `step`. Records without a step stay.
// Also drops corrupt lines, and returns their number. These are a last line that a crash truncated,
// and lines that are not JSON objects. A power loss leaves such lines, often of NUL bytes.
// Replaces the file as a whole, and only when a line is dropped. A missing file is no error.
int64_t truncate_jsonl_after(const std::string& path, int64_t step);

}  // namespace moebius

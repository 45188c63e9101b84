// A log of JSON objects, one on each line. It survives a crash, and is truncated when
// a run resumes.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

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

// The functions below read a log from its end, and no further than to the last record of an earlier step. They rely on
// the order of the records: a run appends those of a step after those of earlier steps, and a resume drops later ones.

// Drops the records whose "step" is above `step`. Records without a step stay.
// Also drops corrupt lines, and returns their number. These are a last line that a crash truncated,
// and lines that are not JSON objects. A power loss leaves such lines, often of NUL bytes. It leaves them after
// the last record of a checkpoint, since a checkpoint is written after sync().
// Cuts the file; if a line after a dropped one stays, replaces it as a whole. A missing file is no error.
int64_t truncate_jsonl_after(const std::string& path, int64_t step);

// Returns whether the log has a whole record of this "kind" and "step". A missing file has none.
bool jsonl_holds(const std::string& path, std::string_view kind, int64_t step);

}  // namespace moebius

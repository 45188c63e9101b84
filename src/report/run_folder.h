// The folder of a run. The run may write to it while it is read.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "report/read_metrics.h"
#include "report/run_data.h"

namespace moebius {

// Reads a growing file of lines. A file that was truncated or replaced is read again from its start, also if it has
// grown beyond its size before.
class LineFile {
 public:
  explicit LineFile(std::string path) : path_(std::move(path)) {}

  enum class Change { none, grown, replaced };
  // Checks the file for changes; a missing file counts as empty. Throws Error{input} if it is not a regular file.
  Change check();
  // Calls add(line) for each line that was completed since the last call, without its line break.
  // MetricsReader::kPadding bytes after a line may be read. A line of more than 64 MiB is passed as an empty line.
  void read_new(const std::function<void(std::string_view)>& add);
  bool has_half_line() const { return offset_ < size_ || is_too_long_; }
  const std::string& path() const { return path_; }
  double modified_s() const { return modified_s_; }  // when it was last written, seconds since 1970; 0: missing

 private:
  bool has_other_bytes() const;  // before offset_

  std::string path_;
  uint64_t device_ = 0, inode_ = 0;
  int64_t size_ = 0, offset_ = 0;  // offset_: of the first line that was not passed to add()
  std::string before_;             // the last bytes before offset_
  bool is_too_long_ = false;       // the bytes before offset_ are the beginning of a line that has not ended
  double modified_s_ = 0;
};

class RunFolder {
 public:
  // Throws Error{input} if the path is not a folder, or has neither metrics nor a recipe.
  explicit RunFolder(std::string path);

  // Reads what was written since the last call. Returns whether anything changed.
  bool poll();
  const RunData& data() const { return *data_; }
  const std::string& path() const { return path_; }
  std::string metrics_path() const { return metrics_.path(); }
  // Returns the name of the folder, for people.
  std::string name() const;
  double modified_s() const { return metrics_.modified_s(); }

 private:
  void start_over();
  bool read_recipe();
  bool list_checkpoints();

  std::string path_;
  LineFile metrics_, events_;
  std::unique_ptr<RunData> data_;
  std::unique_ptr<MetricsReader> reader_;
  std::string recipe_text_;
};

}  // namespace moebius

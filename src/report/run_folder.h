// The folder of a run, which may be written to while it is read.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "report/read_metrics.h"
#include "report/run_data.h"

namespace moebius {

// Follows a file of lines that grows. A file that became shorter or was replaced is read again from its start.
class LineFile {
 public:
  explicit LineFile(std::string path) : path_(std::move(path)) {}

  enum class Change { none, grown, replaced };
  // Looks at the file; a file that is missing is empty. Throws Error{input} if it is no regular file.
  Change look();
  // Calls add(line) for each line that has ended since the last call, without its end.
  // MetricsReader::kPadding bytes after a line may be read. A line of more than 64 MiB is passed as an empty one.
  void read_new(const std::function<void(std::string_view)>& add);
  bool has_half_line() const { return offset_ < size_ || is_too_long_; }
  const std::string& path() const { return path_; }
  double modified_s() const { return modified_s_; }  // when it was last written, seconds since 1970; 0: missing

 private:
  std::string path_;
  uint64_t device_ = 0, inode_ = 0;
  int64_t size_ = 0, offset_ = 0;  // offset: of the first line that was not passed
  bool is_too_long_ = false;       // the bytes before offset_ begin a line that is not over
  double modified_s_ = 0;
};

class RunFolder {
 public:
  // Throws Error{input} if the path is no folder, or neither has metrics nor a recipe.
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

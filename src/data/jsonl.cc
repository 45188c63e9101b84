#include "data/jsonl.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"

namespace moebius {
namespace {

constexpr int64_t kBlock = int64_t{1} << 20;

// The lines of a file, from the last to the first. Only the blocks of lines that were returned are read.
class LinesFromTheEnd {
 public:
  explicit LinesFromTheEnd(const std::string& path)
      : file_(File::open_read(path)), size_(file_.size()), begin_(size_), buffer_begin_(size_) {}

  // Moves to the line before. Returns false if there is none.
  bool next() {
    if (begin_ == 0) return false;
    size_t end_of_previous = std::string::npos;
    while ((end_of_previous = find_break()) == std::string::npos && buffer_begin_ > 0) read_block();
    const size_t first = end_of_previous + 1;  // 0 if the line is the first
    text_ = buffer_.substr(first);
    buffer_.resize(first);
    begin_ = buffer_begin_ + static_cast<int64_t>(first);
    return true;
  }
  int64_t size() const { return size_; }    // of the file
  int64_t begin() const { return begin_; }  // of the line in the file
  // With its line break, if it has one.
  const std::string& text() const { return text_; }
  // Returns no object if the line is corrupt, or may continue.
  nlohmann::json record() const {
    if (!text_.ends_with('\n')) return {};
    return nlohmann::json::parse(text_, nullptr, /*allow_exceptions=*/false);
  }

 private:
  // Returns the place of the line break before the last line of the buffer.
  size_t find_break() const { return buffer_.size() < 2 ? std::string::npos : buffer_.rfind('\n', buffer_.size() - 2); }
  // A long line is read in blocks that double.
  void read_block() {
    const int64_t bytes = std::min(buffer_begin_, std::max(kBlock, std::ssize(buffer_)));
    std::string block(static_cast<size_t>(bytes), '\0');
    buffer_begin_ -= bytes;
    file_.read_at(block.data(), bytes, buffer_begin_);
    buffer_.insert(0, block);
  }

  File file_;
  int64_t size_, begin_, buffer_begin_;
  std::string buffer_;  // the bytes of the file from buffer_begin_ to begin_
  std::string text_;
};

// Returns the step of a record; `otherwise` if it has none.
double step_of(const nlohmann::json& record, int64_t otherwise) {
  const auto it = record.find("step");
  return it == record.end() || !it->is_number() ? static_cast<double>(otherwise) : it->get<double>();
}

// Replaces the file by its first bytes and these lines.
void replace_tail(const std::string& path, int64_t first_bytes, const std::vector<std::string>& lines) {
  PendingFile pending(std::filesystem::canonical(path).string());
  const File before = File::open_read(path);
  std::string block;
  for (int64_t done = 0; done < first_bytes; done += std::ssize(block)) {
    block.resize(static_cast<size_t>(std::min(kBlock, first_bytes - done)));
    before.read_at(block.data(), std::ssize(block), done);
    pending.file().append(block.data(), std::ssize(block));
  }
  for (const std::string& line : lines) pending.file().append(line.data(), std::ssize(line));
  pending.commit();
}

void cut(const std::string& path, int64_t bytes) {
  std::error_code error;
  std::filesystem::resize_file(path, static_cast<uintmax_t>(bytes), error);
  MOEBIUS_CHECK(io, !error, "cut {} to {} bytes: {}; give this user access, check the disk and try again", path, bytes,
                error.message());
  File::open_append(path).sync();
}

}  // namespace

JsonlWriter::JsonlWriter(const std::string& path) : file_(File::open_append(path)) {}

void JsonlWriter::append(const nlohmann::ordered_json& record) {
  const std::string line = record.dump() + "\n";
  file_.append(line.data(), line.size());
}

int64_t truncate_jsonl_after(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return 0;
  LinesFromTheEnd lines(path);
  std::vector<std::string> kept;  // the kept lines that were read, the last first
  size_t after_dropped = 0;       // the number of those that follow a dropped line
  int64_t first_dropped = lines.size(), damaged = 0;
  while (lines.next()) {
    const nlohmann::json record = lines.record();
    damaged += record.is_object() ? 0 : 1;
    if (!record.is_object() || step_of(record, step) > static_cast<double>(step)) {
      first_dropped = lines.begin();
      after_dropped = kept.size();
      continue;
    }
    kept.push_back(lines.text());
    if (step_of(record, step) < static_cast<double>(step)) break;
  }
  if (first_dropped == lines.size()) return damaged;
  kept.resize(after_dropped);
  std::reverse(kept.begin(), kept.end());
  kept.empty() ? cut(path, first_dropped) : replace_tail(path, first_dropped, kept);
  return damaged;
}

bool jsonl_holds(const std::string& path, std::string_view kind, int64_t step) {
  if (!std::filesystem::exists(path)) return false;
  for (LinesFromTheEnd lines(path); lines.next();) {
    const nlohmann::json record = lines.record();
    if (!record.is_object()) continue;
    const double step_here = step_of(record, step + 1);
    if (step_here < static_cast<double>(step)) return false;
    const auto it = record.find("kind");
    if (step_here == static_cast<double>(step) && it != record.end() && *it == kind) return true;
  }
  return false;
}

}  // namespace moebius

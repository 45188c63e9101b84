#include "report/run_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "config/recipe/text.h"
#include "core/error.h"
#include "io/files.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kChunk = int64_t{4} << 20, kLongestLine = int64_t{64} << 20;
constexpr int64_t kCompared = 4096;                       // bytes that show whether the lines before them are the same
constexpr size_t kMaxValueChars = 2000, kMaxKeys = 1000;  // of a recipe: characters of a value, keys
constexpr int64_t kMaxRecipe = int64_t{1} << 20;

// Returns the number in "step-00000100"; -1 for other names.
int64_t step_of_folder(const std::string& name) {
  constexpr std::string_view kBegin = "step-";
  const std::string digits = name.starts_with(kBegin) ? name.substr(kBegin.size()) : "";
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::stoll(digits);
}

std::string shortened(std::string text) {
  if (text.size() <= kMaxValueChars) return text;
  size_t end = kMaxValueChars;
  while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // no character is cut
  return text.substr(0, end) + " ...";
}

std::string last_bytes(const File& file, int64_t end) {
  std::string bytes(static_cast<size_t>(std::min(end, kCompared)), '\0');
  bytes.resize(static_cast<size_t>(file.read_some(bytes.data(), std::ssize(bytes), end - std::ssize(bytes))));
  return bytes;
}

}  // namespace

LineFile::Change LineFile::check() {
  struct stat status = {};
  if (::stat(path_.c_str(), &status) != 0) {
    const bool had = size_ > 0;
    *this = LineFile(path_);
    return had ? Change::replaced : Change::none;
  }
  MOEBIUS_CHECK(input, S_ISREG(status.st_mode),
                "{}: expected a file of lines; got something else; check the run's folder", path_);
  const bool same =
      status.st_dev == device_ && status.st_ino == inode_ && status.st_size >= size_ && !has_other_bytes();
  const bool was_empty = inode_ == 0;
  const bool grew = status.st_size > size_;
  if (!same) offset_ = 0, before_.clear();
  device_ = status.st_dev;
  inode_ = status.st_ino;
  size_ = status.st_size;
  modified_s_ = static_cast<double>(status.st_mtim.tv_sec);
  if (!same && !was_empty) return Change::replaced;
  return grew ? Change::grown : Change::none;
}

bool LineFile::has_other_bytes() const { return offset_ > 0 && last_bytes(File::open_read(path_), offset_) != before_; }

void LineFile::read_new(const std::function<void(std::string_view)>& add) {
  if (offset_ >= size_) return;
  const File file = File::open_read(path_);
  std::string buffer;
  int64_t held = 0;  // bytes at the start of the buffer, of a line whose end was not read yet
  while (offset_ + held < size_) {
    buffer.resize(held + kChunk + MetricsReader::kPadding);
    const int64_t got = file.read_some(buffer.data() + held, std::min(kChunk, size_ - offset_ - held), offset_ + held);
    if (got == 0) return;  // the file was truncated, which the next check() detects
    const char *line = buffer.data(), *const end = line + held + got;
    while (const auto* newline = static_cast<const char*>(std::memchr(line, '\n', end - line))) {
      add(is_too_long_ ? std::string_view() : std::string_view(line, newline - line));
      is_too_long_ = false;
      line = newline + 1;
    }
    held = end - line;
    offset_ += line - buffer.data();
    std::memmove(buffer.data(), line, held);
    if (held <= kLongestLine) continue;
    is_too_long_ = true;
    offset_ += held;
    held = 0;
  }
  before_ = last_bytes(file, offset_);
}

RunFolder::RunFolder(std::string path)
    : path_(std::move(path)), metrics_(path_ + "/metrics.jsonl"), events_(path_ + "/events.jsonl") {
  std::error_code error;
  const auto kind = fs::status(path_, error).type();
  MOEBIUS_CHECK(input, kind == fs::file_type::directory, "{}: expected the folder of a run; got {}; check the path",
                path_, kind == fs::file_type::not_found ? "nothing there" : "something else");
  MOEBIUS_CHECK(input, fs::exists(metrics_.path(), error) || fs::exists(path_ + "/recipe.resolved.toml", error),
                "{}: expected the folder of a run; got one without metrics.jsonl and recipe.resolved.toml; give the "
                "run.dir of a run that has started",
                path_);
  start_over();
}

void RunFolder::start_over() {
  data_ = std::make_unique<RunData>();
  reader_ = std::make_unique<MetricsReader>(*data_);
  recipe_text_.clear();
}

bool RunFolder::poll() {
  const LineFile::Change metrics = metrics_.check(), events = events_.check();
  bool changed = metrics != LineFile::Change::none || events != LineFile::Change::none;
  if (metrics == LineFile::Change::replaced || events == LineFile::Change::replaced) {
    start_over();
    metrics_ = LineFile(metrics_.path());
    events_ = LineFile(events_.path());
    metrics_.check();
    events_.check();
  }
  if (read_recipe()) changed = true;
  metrics_.read_new([&](std::string_view line) { reader_->add_metrics_line(line); });
  events_.read_new([&](std::string_view line) { reader_->add_event_line(line); });
  data_->skipped_lines.half_line = metrics_.has_half_line();
  data_->skipped_event_lines.half_line = events_.has_half_line();
  if (list_checkpoints()) changed = true;
  return changed;
}

bool RunFolder::read_recipe() {
  const std::string file = path_ + "/recipe.resolved.toml";
  std::error_code error;
  std::string problem, text;
  if (!fs::is_regular_file(file, error)) {
    problem = "there is no recipe.resolved.toml";
  } else if (static_cast<int64_t>(fs::file_size(file, error)) > kMaxRecipe) {
    problem = "recipe.resolved.toml is larger than 1 MiB";
  } else {
    text = read_file(file);
    if (text == recipe_text_) return false;
  }
  const bool changed = text != recipe_text_ || problem != data_->recipe_problem;
  data_->recipe.clear();
  recipe_text_ = text;
  try {
    if (problem.empty())
      for (const RecipeEntry& entry : ::moebius::read_recipe(text, "recipe.resolved.toml"))
        if (data_->recipe.size() < kMaxKeys)
          data_->recipe.emplace_back(shortened(entry.key), shortened(toml_text(entry.value)));
  } catch (const Error& e) {
    problem = e.what();
  }
  data_->recipe_problem = problem;
  data_->clip = recipe_number(*data_, "optimizer.clip").value_or(0);
  return changed;
}

bool RunFolder::list_checkpoints() {
  std::vector<int64_t> steps;
  std::error_code error, at;
  for (fs::directory_iterator each(path_ + "/checkpoints", error), end; !error && each != end; each.increment(error)) {
    const int64_t step = step_of_folder(each->path().filename().string());
    if (step >= 0 && fs::exists(each->path() / "manifest.json", at)) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  if (steps == data_->checkpoints) return false;
  data_->checkpoints = std::move(steps);
  return true;
}

std::string RunFolder::name() const {
  const fs::path path = fs::absolute(path_).lexically_normal();
  const std::string name = path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  return name.empty() ? path_ : name;
}

}  // namespace moebius

#include "data/jsonl.h"

#include <filesystem>
#include <nlohmann/json.hpp>

namespace moebius {
namespace {

// Returns false for a record that a resumed run will write again.
bool is_kept(const nlohmann::json& record, int64_t step) {
  const auto it = record.find("step");
  return it == record.end() || !it->is_number() || it->get<double>() <= static_cast<double>(step);
}

}  // namespace

JsonlWriter::JsonlWriter(const std::string& path) : file_(File::open_append(path)) {}

void JsonlWriter::append(const nlohmann::ordered_json& record) {
  const std::string line = record.dump() + "\n";
  file_.append(line.data(), line.size());
}

int64_t truncate_jsonl_after(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return 0;
  const std::string before = read_file(path);
  std::string after;
  int64_t damaged = 0;
  for (size_t begin = 0; begin < before.size();) {
    const size_t end = before.find('\n', begin);
    if (end == std::string::npos) {  // a line without its newline does not count
      ++damaged;
      break;
    }
    const std::string_view line = std::string_view(before).substr(begin, end - begin);
    const auto record = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object())
      ++damaged;
    else if (is_kept(record, step))
      after.append(line).push_back('\n');
    begin = end + 1;
  }
  if (after != before) write_file_atomic(path, after);
  return damaged;
}

}  // namespace moebius

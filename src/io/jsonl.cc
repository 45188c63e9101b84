#include "io/jsonl.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/error.h"

namespace moebius {
namespace {

// False for a record that a resumed run will write again.
bool is_kept(std::string_view line, int64_t step, const std::string& path, int64_t number) {
  const auto record = nlohmann::json::parse(line, nullptr, false);
  MOEBIUS_CHECK(input, record.is_object(),
                "{}:{}: expected a JSON object; got \"{}\"; correct the line or move the file away", path, number,
                line.substr(0, 60));
  const auto it = record.find("step");
  return it == record.end() || !it->is_number() || it->get<double>() <= static_cast<double>(step);
}

}  // namespace

JsonlWriter::JsonlWriter(const std::string& path) : file_(File::open_append(path)) {}

void JsonlWriter::append(const nlohmann::ordered_json& record) {
  const std::string line = record.dump() + "\n";
  file_.append(line.data(), line.size());
}

void truncate_jsonl_after(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return;
  const std::string before = read_file(path);
  std::string after;
  int64_t number = 0;
  for (size_t begin = 0; begin < before.size();) {
    const size_t end = before.find('\n', begin);
    if (end == std::string::npos) break;  // a line counts once its newline is there
    const std::string_view line = std::string_view(before).substr(begin, end - begin);
    if (is_kept(line, step, path, ++number)) after.append(line).push_back('\n');
    begin = end + 1;
  }
  if (after != before) write_file_atomic(path, after);
}

}  // namespace moebius

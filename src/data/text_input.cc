#include "data/text_input.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "core/error.h"

namespace moebius {
namespace {

constexpr size_t kReadBytes = 256 << 10;

bool is_jsonl(std::string_view path) {
  if (path.ends_with(".zst")) path.remove_suffix(4);
  return path.ends_with(".jsonl");
}

// Returns how to make a .jsonl of a file with this ending, before which is_zst says that .zst was removed.
std::string conversion(const std::string& path, std::string_view ending, bool is_zst) {
  if (ending == ".json")
    return fmt::format("if it is one list, make a line of each element: {} > NAME.jsonl",
                       is_zst ? fmt::format("zstd -dc {} | jq -c '.[]'", path) : fmt::format("jq -c '.[]' {}", path));
  if (ending == ".ndjson") return is_zst ? "rename it to .jsonl.zst" : "rename it to .jsonl";
  const std::string first = is_zst ? "decompress it with zstd -d; then " : "";
  if (ending == ".parquet" || ending == ".arrow")
    return first + fmt::format("convert it with Python's datasets: Dataset.{}(\"{}\").to_json(\"NAME.jsonl\")",
                               ending == ".arrow" ? "from_file" : "from_parquet",
                               is_zst ? path.substr(0, path.size() - 4) : path);
  return first + "convert it, for example to .jsonl.zst (one object a line, its text under \"text\")";
}

void refuse_other_formats(const std::string& path) {
  // The last four are here because as plain text their markup would be trained on.
  constexpr std::array<std::string_view, 12> kOthers{".gz",  ".xz",  ".bz2",  ".zip",    ".parquet", ".arrow",
                                                     ".bin", ".npy", ".json", ".ndjson", ".csv",     ".tsv"};
  std::string_view name = path;
  const bool is_zst = name.ends_with(".zst");
  if (is_zst) name.remove_suffix(4);
  const auto other =
      std::find_if(kOthers.begin(), kOthers.end(), [&](std::string_view e) { return name.ends_with(e); });
  MOEBIUS_CHECK(usage, other == kOthers.end(), "text input {}: expected text, .jsonl or either with .zst; got {}; {}",
                path, *other, conversion(path, *other, is_zst));
}

// Appends up to kReadBytes. Returns false at the end.
bool read_more(ByteSource& source, std::string* bytes) {
  const size_t size = bytes->size();
  bytes->resize(size + kReadBytes);
  const int64_t got = source.read(bytes->data() + size, kReadBytes);
  bytes->resize(size + got);
  return got > 0;
}

}  // namespace

std::vector<Document> documents_of(const TextBlock& block) {
  if (!block.is_jsonl) return {{.text = block.bytes, .who = block.path}};
  std::vector<Document> documents;
  int64_t number = block.first_line;
  for (size_t begin = 0; begin < block.bytes.size(); ++number) {
    const size_t end = std::min(block.bytes.find('\n', begin), block.bytes.size());
    const std::string_view line = std::string_view(block.bytes).substr(begin, end - begin);
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    documents.push_back(read_document(line, fmt::format("{}:{}", block.path, number)));
  }
  return documents;
}

TextInput::TextInput(const std::string& path) : path_(path), is_jsonl_(is_jsonl(path)) {
  refuse_other_formats(path);
  source_ = open_bytes(path);
}

bool TextInput::next_lines(TextBlock* block) {
  block->bytes = std::move(rest_);
  rest_.clear();
  block->first_line = lines_ + 1;
  size_t searched = block->bytes.size(), end = std::string::npos;
  while (end == std::string::npos && !done_) {
    done_ = !read_more(*source_, &block->bytes);
    end = std::string_view(block->bytes).substr(searched).rfind('\n');  // searches a long line only once
    if (end != std::string::npos) end += searched;
    searched = block->bytes.size();
  }
  if (!done_) {
    rest_ = block->bytes.substr(end + 1);
    block->bytes.resize(end + 1);
  }
  lines_ += std::count(block->bytes.begin(), block->bytes.end(), '\n');
  return !block->bytes.empty();
}

bool TextInput::next(TextBlock* block) {
  *block = {.path = path_, .is_jsonl = is_jsonl_};
  if (is_jsonl_) return next_lines(block);
  if (done_) return false;
  done_ = true;
  while (read_more(*source_, &block->bytes)) {
  }
  return true;
}

}  // namespace moebius

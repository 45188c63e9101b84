#include "io/text_input.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "core/error.h"
#include "io/json_text.h"
#include "io/utf8.h"

namespace moebius {
namespace {

constexpr size_t kChunkBytes = 1 << 20;

bool is_jsonl(std::string_view path) {
  if (path.ends_with(".zst")) path.remove_suffix(4);
  return path.ends_with(".jsonl");
}

void refuse_other_formats(const std::string& path) {
  // .json and .ndjson too: read as text, their markup would be trained on.
  constexpr std::array<std::string_view, 10> kOthers{".gz",    ".xz",  ".bz2", ".zip",  ".parquet",
                                                     ".arrow", ".bin", ".npy", ".json", ".ndjson"};
  const auto other =
      std::find_if(kOthers.begin(), kOthers.end(), [&](std::string_view e) { return path.ends_with(e); });
  MOEBIUS_CHECK(usage, other == kOthers.end(),
                "text input {}: expected text, .jsonl or either with .zst; got {}; convert it first, for example to "
                ".jsonl.zst (one object a line, its text under \"text\")",
                path, *other);
}

std::string text_of_json(const std::string& line, const std::string& path, int64_t number) {
  const int64_t bad = find_invalid_utf8(line);
  MOEBIUS_CHECK(input, bad < 0, "{}:{}:{}: expected UTF-8; got byte 0x{:02x}; correct or drop the line", path, number,
                bad + 1, static_cast<uint8_t>(line[bad]));
  nlohmann::json record = parse_json(line, fmt::format("{}:{}", path, number));
  const auto it = record.is_object() ? record.find("text") : record.end();
  MOEBIUS_CHECK(input, it != record.end() && it->is_string(),
                "{}:{}: expected an object with a string \"text\"; got {}; correct or drop the line", path, number,
                line.substr(0, 60));
  return std::move(it->get_ref<std::string&>());
}

}  // namespace

TextInput::TextInput(const std::string& path) : path_(path), is_jsonl_(is_jsonl(path)), chunk_(kChunkBytes) {
  refuse_other_formats(path);
  source_ = open_bytes(path);
}

bool TextInput::fill() {
  chunk_begin_ = 0;
  chunk_end_ = source_->read(chunk_.data(), chunk_.size());
  return chunk_end_ > 0;
}

bool TextInput::next_line(std::string* line) {
  line->clear();
  while (chunk_begin_ < chunk_end_ || fill()) {
    const auto begin = chunk_.begin() + chunk_begin_, end = chunk_.begin() + chunk_end_;
    const auto newline = std::find(begin, end, '\n');
    line->append(begin, newline);
    chunk_begin_ = newline - chunk_.begin();
    if (newline == end) continue;
    ++chunk_begin_;
    ++line_;
    return true;
  }
  ++line_;
  return !line->empty();
}

bool TextInput::next(std::string* text) {
  if (is_jsonl_) {
    std::string line;
    while (next_line(&line)) {
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      *text = text_of_json(line, path_, line_);
      return true;
    }
    return false;
  }
  if (done_) return false;
  done_ = true;
  text->clear();
  while (fill()) text->append(chunk_.begin(), chunk_.begin() + chunk_end_);
  return true;
}

}  // namespace moebius

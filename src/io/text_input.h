// The documents of a text file, one after the other:
//   *.jsonl, *.jsonl.zst   one object a line, its text under "text"; blank lines are skipped
//   any other, also *.zst  the whole file is one document, byte for byte
// Names of formats that are not read (.gz, .xz, .bz2, .zip, .parquet, .arrow, .bin, .npy, .json, .ndjson) are refused
// rather than taken as text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/byte_source.h"

namespace moebius {

class TextInput {
 public:
  explicit TextInput(const std::string& path);

  // The next document, or false at the end. Error{input} with file:line for a line that is no object with a string
  // "text", with file:line:byte for invalid UTF-8 in it.
  bool next(std::string* text);

 private:
  bool next_line(std::string* line);
  bool fill();

  std::string path_;
  bool is_jsonl_;
  std::unique_ptr<ByteSource> source_;
  std::vector<char> chunk_;
  size_t chunk_begin_ = 0, chunk_end_ = 0;  // what of chunk_ is unread
  int64_t line_ = 0;
  bool done_ = false;
};

}  // namespace moebius

// The documents of a text file, in blocks that can be taken apart by different threads:
//   *.jsonl, *.jsonl.zst   one object a line (data/document.h); blank lines are skipped
//   any other, also *.zst  the whole file is one document, byte for byte
// Names of formats that are not read (.gz, .xz, .bz2, .zip, .parquet, .arrow, .bin, .npy, .json, .ndjson) are refused
// rather than taken as text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/byte_source.h"
#include "data/document.h"

namespace moebius {

// A piece of a file that has whole documents.
struct TextBlock {
  std::string path;
  std::string bytes;  // whole lines of jsonl, or a file
  bool is_jsonl = false;
  int64_t first_line = 1;  // of the file
};

// Error{input} with file:line for a line that is no document, with file:line:byte for invalid UTF-8 in it.
std::vector<Document> documents_of(const TextBlock& block);

class TextInput {
 public:
  explicit TextInput(const std::string& path);

  // The next block, or false at the end: the lines that end in the next 256 KiB or so, or the whole of a file.
  bool next(TextBlock* block);

 private:
  bool next_lines(TextBlock* block);

  std::string path_;
  bool is_jsonl_;
  std::unique_ptr<ByteSource> source_;
  std::string rest_;  // of a line whose end is not read yet
  int64_t lines_ = 0;
  bool done_ = false;
};

}  // namespace moebius

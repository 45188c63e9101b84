// Reads the documents of a text file, in blocks that different threads can parse:
//   *.jsonl, *.jsonl.zst   one object per line (data/document.h); blank lines are skipped
//   any other file, *.zst  the whole file is one document, byte for byte
// Files of other formats are refused by extension, so that they are not read as text: .gz,
// .xz, .bz2, .zip, .parquet, .arrow, .bin, .npy, .json, .ndjson.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/byte_source.h"
#include "data/document.h"

namespace moebius {

// A piece of a file that consists of whole documents.
struct TextBlock {
  std::string path;
  std::string bytes;  // whole lines of jsonl, or a whole file
  bool is_jsonl = false;
  int64_t first_line = 1;  // number in the file
};

// Throws Error{input} with file:line for a line that is not a document, and with file:line:byte for
// invalid UTF-8.
std::vector<Document> documents_of(const TextBlock& block);

class TextInput {
 public:
  explicit TextInput(const std::string& path);

  // Reads the next block, or returns false at the end. A block is the lines that end in the next
  // 256 KiB or so, or a whole file.
  bool next(TextBlock* block);

 private:
  bool next_lines(TextBlock* block);

  std::string path_;
  bool is_jsonl_;
  std::unique_ptr<ByteSource> source_;
  std::string rest_;  // the line whose end has not been read yet
  int64_t lines_ = 0;
  bool done_ = false;
};

}  // namespace moebius

// safetensors files: u64 header size, a JSON header, then the tensors' bytes back to back.
//
// The reader believes nothing: the whole header is checked at open, so that every
// entry lies inside the file, no two share a byte and none leaves a hole. The writer
// lays tensors out by falling element size, then by name, as the original does.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/dtype.h"
#include "io/files.h"
#include "io/hash.h"

namespace moebius {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;  // any rank; [] is one element
  int64_t offset = 0;          // from the start of the file
  int64_t bytes = 0;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // by offset
  SafetensorsMetadata metadata;
};

// Error{input} naming `who` unless `json` is a legal header of a file with `data_bytes`
// behind it. Entry offsets are relative to the data here. Stricter than the format: no
// unknown field in an entry, no "..", no NUL in a name, rank at most 32.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& who);

// An open file whose header was found right. Reading is safe from several threads.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const SafetensorsMetadata& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(const std::string& name) const;  // null when there is none
  const SafetensorsEntry& at(const std::string& name) const;    // Error{input} when there is none

  void read(const SafetensorsEntry& entry, void* dst) const { read(entry, 0, entry.bytes, dst); }
  // Bytes [begin, end) of the entry. REQUIRES: 0 <= begin <= end <= entry.bytes.
  void read(const SafetensorsEntry& entry, int64_t begin, int64_t end, void* dst) const;

 private:
  File file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> index_;
};

// What a tensor will be, before its bytes are known.
struct SafetensorsDecl {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
};

// Writes one file in place: who needs it to appear whole renames a folder or a file after close().
// Different tensors may be written from different threads.
class SafetensorsWriter {
 public:
  static constexpr int64_t kHashedBytes = int64_t{4} << 20;

  // Writes the header. Error{usage} for names used twice or "__metadata__".
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsDecl> tensors,
                    const SafetensorsMetadata& metadata = {});

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  int64_t file_bytes() const { return file_bytes_; }

  // The next `bytes` of the tensor; a tensor may come in pieces. Error{usage} past its end.
  void write(const std::string& name, const void* src, int64_t bytes);
  // Of every kHashedBytes of it and of the rest, of what was written so far: parts of a tensor can be proven alone.
  std::vector<Hash128> hashes(const std::string& name) const;
  void close();  // Error{usage} unless every tensor is whole; fsync

 private:
  struct Progress {
    int64_t written = 0;
    std::vector<Hasher> hashers;  // a tensor without bytes has one, too
  };
  size_t index_of(const std::string& name) const;

  File file_;
  std::vector<SafetensorsEntry> entries_;
  std::vector<Progress> progress_;
  std::unordered_map<std::string, size_t> index_;
  int64_t file_bytes_ = 0;
};

struct SafetensorsTensor {
  SafetensorsDecl decl;
  const void* data = nullptr;
};

// The whole file at once, through a temporary file and a rename.
void write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                       const SafetensorsMetadata& metadata = {});

// "BF16" and the like. dtype_of_safetensors gives Error{input} naming `who` for what Moebius has no type for.
std::string_view safetensors_name(DType dtype);
DType dtype_of_safetensors(std::string_view name, const std::string& who);

}  // namespace moebius

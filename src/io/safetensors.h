// safetensors files: a u64 header size, a JSON header, then the bytes of the tensors.
//
// The reader trusts nothing: the whole header is checked when the file is opened.
// Every entry is inside the file, no two entries share a byte, and there are no holes.
// The writer orders tensors by decreasing element size, then by name, as the original library does.
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
  int64_t offset = 0;          // bytes from the start of the file
  int64_t bytes = 0;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // sorted by offset
  SafetensorsMetadata metadata;
};

// Parses `json`, the header of a file with `data_bytes` bytes after the header.
// Throws Error{input} naming `who` unless the header is valid. Entry offsets are relative to the
// data here. The rules are stricter than the format: no unknown field in an entry, no ".." and no
// NUL in a name, rank at most 32.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& who);

// An open file with a checked header. Several threads may read at once.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return file_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const SafetensorsMetadata& metadata() const { return header_.metadata; }
  const SafetensorsEntry* find(const std::string& name) const;  // null when there is no such tensor
  const SafetensorsEntry& at(const std::string& name) const;    // throws Error{input} when there is no such tensor

  void read(const SafetensorsEntry& entry, void* dst) const { read(entry, 0, entry.bytes, dst); }
  // Reads bytes [begin, end) of the entry. REQUIRES: 0 <= begin <= end <= entry.bytes.
  void read(const SafetensorsEntry& entry, int64_t begin, int64_t end, void* dst) const;

 private:
  File file_;
  SafetensorsHeader header_;
  std::unordered_map<std::string, size_t> index_;
};

// The declaration of a tensor whose bytes are written later.
struct SafetensorsDecl {
  std::string name;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
};

// Writes one file in place.
// A caller that needs it to appear complete renames a folder or a file after close().
// Different threads may write different tensors.
class SafetensorsWriter {
 public:
  static constexpr int64_t kHashedBytes = int64_t{4} << 20;

  // Writes the header. Throws Error{usage} for a repeated name and for "__metadata__".
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsDecl> tensors,
                    const SafetensorsMetadata& metadata = {});

  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  int64_t file_bytes() const { return file_bytes_; }

  // Writes the next `bytes` of the tensor, which may come in pieces. Throws Error{usage}
  // beyond its end.
  void write(const std::string& name, const void* src, int64_t bytes);
  // Returns the hash of each kHashedBytes written so far, and of the rest:
  // each part can be verified on its own.
  std::vector<Hash128> hashes(const std::string& name) const;
  void close();  // syncs the file; Error{usage} unless every tensor is complete

 private:
  struct Progress {
    int64_t written = 0;
    std::vector<Hasher> hashers;  // at least one, even for a tensor without bytes
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

// Writes the whole file at once, by way of a temporary file and a rename.
void write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                       const SafetensorsMetadata& metadata = {});

// Names such as "BF16".
// dtype_of_safetensors throws Error{input} naming `who` for a type that Moebius does not have.
std::string_view safetensors_name(DType dtype);
DType dtype_of_safetensors(std::string_view name, const std::string& who);

}  // namespace moebius

#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "io/lfs_pointer.h"

namespace moebius {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian and is read without conversion");

constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr int64_t kPrefixBytes = 8;  // the u64 before the header

constexpr std::array<std::pair<DType, std::string_view>, 15> kNames{{
    {DType::f32, "F32"},
    {DType::bf16, "BF16"},
    {DType::f16, "F16"},
    {DType::f64, "F64"},
    {DType::i32, "I32"},
    {DType::i64, "I64"},
    {DType::u8, "U8"},
    {DType::u16, "U16"},
    {DType::i8, "I8"},
    {DType::i16, "I16"},
    {DType::u32, "U32"},
    {DType::u64, "U64"},
    {DType::boolean, "BOOL"},
    {DType::f8_e4m3, "F8_E4M3"},
    {DType::f8_e5m2, "F8_E5M2"},
}};

void refuse_lfs_pointer(const File& file) {
  std::string start(kLfsPointer.size(), '\0');
  start.resize(file.read_some(start.data(), std::ssize(start), 0));
  MOEBIUS_CHECK(input, start != kLfsPointer,
                "safetensors {}: expected tensors; got a Git LFS pointer to them; run git lfs pull in its folder",
                file.path());
}

int64_t header_bytes(const File& file, int64_t file_bytes) {
  refuse_lfs_pointer(file);
  uint64_t n = 0;
  MOEBIUS_CHECK(input, file_bytes >= kPrefixBytes,
                "safetensors {}: expected at least 8 bytes; got {}; the file is truncated, fetch it again", file.path(),
                file_bytes);
  file.read_at(&n, kPrefixBytes, 0);
  // The comparison is with the bytes left, since 8 + n may wrap.
  MOEBIUS_CHECK(
      input, n <= static_cast<uint64_t>(std::min(kMaxHeaderBytes, file_bytes - kPrefixBytes)),
      "safetensors {}: expected a header of at most {} bytes in a file of {}; got {}; the file is truncated or is "
      "not a safetensors file, fetch it again",
      file.path(), kMaxHeaderBytes, file_bytes, n);
  return static_cast<int64_t>(n);
}

int64_t bytes_of(const SafetensorsDecl& decl) {
  int64_t bytes = size_of(decl.dtype);
  for (const int64_t dim : decl.shape) {
    MOEBIUS_CHECK(
        usage, dim >= 0 && !__builtin_mul_overflow(bytes, dim, &bytes),
        "safetensors: expected a shape of dims >= 0 and less than 2^63 bytes; got [{}] for \"{}\"; correct the shape",
        fmt::join(decl.shape, ", "), decl.name);
  }
  return bytes;
}

std::string header_text(const std::vector<SafetensorsEntry>& entries, const SafetensorsMetadata& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  for (const SafetensorsEntry& e : entries) {
    json[e.name] = {
        {"dtype", safetensors_name(e.dtype)}, {"shape", e.shape}, {"data_offsets", {e.offset, e.offset + e.bytes}}};
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

std::vector<SafetensorsEntry> lay_out(std::vector<SafetensorsDecl> tensors) {
  std::sort(tensors.begin(), tensors.end(), [](const SafetensorsDecl& a, const SafetensorsDecl& b) {
    const int64_t size_a = size_of(a.dtype), size_b = size_of(b.dtype);
    return size_a != size_b ? size_a > size_b : a.name < b.name;
  });
  std::vector<SafetensorsEntry> entries;
  int64_t offset = 0;
  for (SafetensorsDecl& t : tensors) {
    const int64_t bytes = bytes_of(t);
    entries.push_back({std::move(t.name), t.dtype, std::move(t.shape), offset, bytes});
    offset += bytes;
  }
  return entries;
}

}  // namespace

std::string_view safetensors_name(DType dtype) {
  for (const auto& [type, name] : kNames) {
    if (type == dtype) return name;
  }
  MOEBIUS_ASSERT(!"a dtype without a safetensors name");
}

DType dtype_of_safetensors(std::string_view name, const std::string& who) {
  for (const auto& [type, text] : kNames) {
    if (text == name) return type;
  }
  MOEBIUS_FAIL(input, "safetensors {}: expected a dtype such as F32 or BF16; got {}; convert the tensor first", who,
               name);
}

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile st;
  st.file_ = File::open_read(path);
  const int64_t file_bytes = st.file_.size();
  const int64_t n = header_bytes(st.file_, file_bytes);
  std::string json(n, '\0');
  st.file_.read_at(json.data(), n, kPrefixBytes);
  st.header_ = parse_safetensors_header(json, file_bytes - kPrefixBytes - n, path);
  for (size_t i = 0; i < st.header_.entries.size(); ++i) {
    st.header_.entries[i].offset += kPrefixBytes + n;
    st.index_.emplace(st.header_.entries[i].name, i);
  }
  return st;
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &header_.entries[it->second];
}

const SafetensorsEntry& SafetensorsFile::at(const std::string& name) const {
  const SafetensorsEntry* entry = find(name);
  MOEBIUS_CHECK(input, entry != nullptr,
                "safetensors {}: expected a tensor \"{}\"; got none of that name among {}; check the file", path(),
                name, entries().size());
  return *entry;
}

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t begin, int64_t end, void* dst) const {
  MOEBIUS_CHECK(usage, 0 <= begin && begin <= end && end <= entry.bytes,
                "safetensors {}: expected a range inside the {} bytes of \"{}\"; got [{}, {}); ask for less", path(),
                entry.bytes, entry.name, begin, end);
  file_.read_at(dst, end - begin, entry.offset + begin);
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsDecl> tensors,
                                     const SafetensorsMetadata& metadata)
    : file_(File::create(path)), entries_(lay_out(std::move(tensors))), progress_(entries_.size()) {
  const std::string header = header_text(entries_, metadata);
  const uint64_t n = header.size();
  MOEBIUS_CHECK(usage, n <= kMaxHeaderBytes,
                "safetensors {}: expected a header of at most {} bytes; got {}; split it into more files", path,
                kMaxHeaderBytes, n);
  file_.write_at(&n, kPrefixBytes, 0);
  file_.write_at(header.data(), n, kPrefixBytes);
  file_bytes_ = kPrefixBytes + n;
  for (size_t i = 0; i < entries_.size(); ++i) {
    SafetensorsEntry& e = entries_[i];
    MOEBIUS_CHECK(usage, e.name != "__metadata__" && index_.emplace(e.name, i).second,
                  "safetensors {}: expected distinct names that are not reserved; got \"{}\"; name it differently",
                  path, e.name);
    e.offset += kPrefixBytes + n;
    file_bytes_ += e.bytes;
    progress_[i].hashers.emplace_back();
  }
}

size_t SafetensorsWriter::index_of(const std::string& name) const {
  const auto it = index_.find(name);
  MOEBIUS_CHECK(usage, it != index_.end(), "safetensors {}: expected a declared tensor; got \"{}\"; declare it first",
                file_.path(), name);
  return it->second;
}

void SafetensorsWriter::write(const std::string& name, const void* src, int64_t bytes) {
  const size_t i = index_of(name);
  const SafetensorsEntry& e = entries_[i];
  Progress& p = progress_[i];
  MOEBIUS_CHECK(usage, bytes >= 0 && bytes <= e.bytes - p.written,
                "safetensors {}: expected at most {} more bytes of \"{}\"; got {}; write what was declared",
                file_.path(), e.bytes - p.written, name, bytes);
  file_.write_at(src, bytes, e.offset + p.written);
  const auto* from = static_cast<const std::byte*>(src);
  for (int64_t done = 0; done < bytes;) {
    const int64_t chunk = p.written / kHashedBytes, end = (chunk + 1) * kHashedBytes;
    const int64_t count = std::min(bytes - done, end - p.written);
    if (chunk == std::ssize(p.hashers)) p.hashers.emplace_back();
    p.hashers.back().update(from + done, count);
    p.written += count;
    done += count;
  }
}

std::vector<Hash128> SafetensorsWriter::hashes(const std::string& name) const {
  std::vector<Hash128> digests;
  for (const Hasher& hasher : progress_[index_of(name)].hashers) digests.push_back(hasher.digest());
  return digests;
}

void SafetensorsWriter::close() {
  for (size_t i = 0; i < entries_.size(); ++i) {
    MOEBIUS_CHECK(usage, progress_[i].written == entries_[i].bytes,
                  "safetensors {}: expected {} bytes of \"{}\" before close; got {}; write the rest", file_.path(),
                  entries_[i].bytes, entries_[i].name, progress_[i].written);
  }
  file_.sync();
  file_.close();
}

void write_safetensors(const std::string& path, const std::vector<SafetensorsTensor>& tensors,
                       const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsDecl> decls;
  for (const SafetensorsTensor& t : tensors) decls.push_back(t.decl);
  PendingFile pending(path);
  SafetensorsWriter writer(pending.file().path(), std::move(decls), metadata);
  for (const SafetensorsTensor& t : tensors) writer.write(t.decl.name, t.data, bytes_of(t.decl));
  writer.close();
  pending.commit();
}

}  // namespace moebius

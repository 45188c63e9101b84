#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "io/files.h"
#include "io/hash.h"
#include "train/checkpoint.h"
#include "train/checkpoint_manifest.h"

namespace moebius {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;  // hashed while still in the cache
constexpr size_t kMostListed = 20;
constexpr const char* kAdvice = "remove the folder or use the checkpoint before it";

std::string read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  try {
    return read_file(path);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::input) throw;
    MOEBIUS_FAIL(input, "checkpoint {}: expected {}, the mark of a finished save; got none ({}); check the path, or {}",
                 folder, kManifestName, e.what(), kAdvice);
  }
}

void check_file(const std::string& folder, const std::string& name, const CheckpointFile& expected) {
  const std::string path = folder + "/" + name;
  const File file = File::open_read(path);
  MOEBIUS_CHECK(input, file.size() == expected.bytes, "checkpoint {}: expected {} bytes; got {}; {}", path,
                expected.bytes, file.size(), kAdvice);
  std::string header(expected.header_bytes, '\0');
  file.read_at(header.data(), expected.header_bytes, 0);
  const std::string hash = to_hex(hash_bytes(header.data(), expected.header_bytes));
  MOEBIUS_CHECK(input, hash == expected.header_xxh3,
                "checkpoint {}: expected a header of {} bytes with XXH3 {}; got {}; the file is damaged, {}", path,
                expected.header_bytes, expected.header_xxh3, hash, kAdvice);
}

std::string text_of(const CheckpointTensor& t) {
  return fmt::format("{}[{}]", name_of(t.dtype), fmt::join(t.shape, ", "));
}

bool is_like(const CheckpointTensor& t, const Tensor& other) {
  return text_of(t) == to_string(other) && t.bytes == other.num_bytes();
}

// "2 missing (a, b)"; nothing for none.
std::string listed(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  const auto end = names.begin() + std::min(names.size(), kMostListed);
  return fmt::format(" {} {} ({}{})", names.size(), what, fmt::join(names.begin(), end, ", "),
                     names.size() > kMostListed ? ", ..." : "");
}

// Fills dst, or a buffer of its own when there is none, piece by piece.
Hash128 read_hashed(const File& file, const CheckpointTensor& t, std::byte* dst) {
  std::vector<std::byte> buffer(dst ? 0 : std::min(t.bytes, kPieceBytes));
  Hasher hasher;
  for (int64_t done = 0; done < t.bytes; done += kPieceBytes) {
    const int64_t bytes = std::min(kPieceBytes, t.bytes - done);
    std::byte* piece = dst ? dst + done : buffer.data();
    file.read_at(piece, bytes, t.offset + done);
    hasher.update(piece, bytes);
  }
  return hasher.digest();
}

}  // namespace

CheckpointReader::CheckpointReader(const std::string& folder) : folder_(folder) {
  manifest_ = std::make_shared<const CheckpointManifest>(parse_manifest(read_manifest(folder), folder));
  for (const auto& [name, file] : manifest_->files) check_file(folder, name, file);
}

int64_t CheckpointReader::step() const { return manifest_->step; }

const nlohmann::json& CheckpointReader::meta() const { return manifest_->meta; }

const std::map<std::string, CheckpointTensor>& CheckpointReader::tensors() const { return manifest_->tensors; }

int64_t CheckpointReader::num_files() const { return static_cast<int64_t>(manifest_->files.size()); }

int64_t CheckpointReader::num_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, file] : manifest_->files) bytes += file.bytes;
  return bytes;
}

const CheckpointTensor& CheckpointReader::at(const std::string& name) const {
  const auto it = manifest_->tensors.find(name);
  MOEBIUS_CHECK(input, it != manifest_->tensors.end(),
                "checkpoint {}: expected a tensor \"{}\"; got {} others; it is of another model", folder_, name,
                manifest_->tensors.size());
  return it->second;
}

void CheckpointReader::read_verified(const std::string& name, void* dst) const {
  const CheckpointTensor& t = at(name);
  const File file = File::open_read(folder_ + "/" + t.file);
  const std::string hash = to_hex(read_hashed(file, t, static_cast<std::byte*>(dst)));
  MOEBIUS_CHECK(input, hash == t.xxh3,
                "checkpoint {}: expected tensor \"{}\", {} bytes at {}, with XXH3 {}; got {}; the file is damaged, {}",
                file.path(), name, t.bytes, t.offset, t.xxh3, hash, kAdvice);
}

void CheckpointReader::verify(const std::string& name) const { read_verified(name, nullptr); }

void CheckpointReader::read(const std::string& name, const Tensor& into, Stream* s) const {
  MOEBIUS_CHECK(usage, into.device == (s ? s->device() : DeviceKind::cpu),
                "checkpoint: expected {} memory for \"{}\"; got {}; copy it after", s ? name_of(s->device()) : "CPU",
                name, name_of(into.device));
  MOEBIUS_CHECK(input, is_like(at(name), into),
                "checkpoint {}: expected \"{}\" to be {}; got {}; it is of another model", folder_, name,
                to_string(into), text_of(at(name)));
  if (into.device == DeviceKind::cpu) return read_verified(name, into.data);
  std::vector<std::byte> bytes(into.num_bytes());
  read_verified(name, bytes.data());
  copy_to_device(*s, into.data, bytes.data(), into.num_bytes());
  synchronize(*s);
}

void CheckpointReader::read_all(const std::vector<NamedTensor>& into, Stream* s) const {
  std::set<std::string> asked;
  std::vector<std::string> missing, unexpected, different;
  for (const auto& [name, tensor] : into) {
    asked.insert(name);
    const auto it = manifest_->tensors.find(name);
    if (it == manifest_->tensors.end()) {
      missing.push_back(name);
    } else if (!is_like(it->second, tensor)) {
      different.push_back(fmt::format("{}: {} asked, {} saved", name, to_string(tensor), text_of(it->second)));
    }
  }
  for (const auto& [name, tensor] : manifest_->tensors) {
    if (!asked.contains(name)) unexpected.push_back(name);
  }
  MOEBIUS_CHECK(
      input, missing.empty() && unexpected.empty() && different.empty(),
      "checkpoint {}: expected exactly the {} tensors of this model; got{}{}{}; use the recipe that saved it or "
      "another folder",
      folder_, into.size(), listed("missing", missing), listed("unexpected", unexpected),
      listed("different", different));
  for (const auto& [name, tensor] : into) read(name, tensor, s);
}

}  // namespace moebius

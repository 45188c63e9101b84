#include "checkpoint/reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>

#include "checkpoint/manifest.h"
#include "comm/control.h"
#include "core/error.h"
#include "io/files.h"
#include "io/hash.h"
#include "io/safetensors.h"

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

TensorSlice slice_of(const NamedTensor& t) { return t.slice ? *t.slice : whole_slice(dims_of(t.tensor.shape)); }

std::string text_of(const NamedTensor& t) {
  return fmt::format("{}[{}]", name_of(t.tensor.dtype), fmt::join(slice_of(t).shape, ", "));
}

bool is_like(const CheckpointTensor& saved, const NamedTensor& asked) {
  const TensorSlice slice = slice_of(asked);
  const bool is_narrowed = asked.converts && (saved.dtype == DType::f32 || saved.dtype == DType::bf16);
  return (saved.dtype == asked.tensor.dtype || is_narrowed) && saved.shape == slice.shape &&
         slice.numel() == asked.tensor.numel();
}

// bf16 elements as f32, or f32 elements rounded to the nearest bf16.
std::vector<std::byte> converted(const std::vector<std::byte>& from, DType dtype, int64_t numel) {
  std::vector<std::byte> to(bytes_of(dtype == DType::f32 ? DType::bf16 : DType::f32, numel));
  const auto convert = [&]<class From, class To>(const From* x, To* y) {
    for (int64_t i = 0; i < numel; ++i) y[i] = from_f32<To>(to_f32(x[i]));
  };
  if (dtype == DType::f32)
    convert(reinterpret_cast<const float*>(from.data()), reinterpret_cast<bf16*>(to.data()));
  else
    convert(reinterpret_cast<const bf16*>(from.data()), reinterpret_cast<float*>(to.data()));
  return to;
}

// "2 missing (a, b)"; nothing for none.
std::string listed(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  const auto end = names.begin() + std::min(names.size(), kMostListed);
  return fmt::format(" {} {} ({}{})", names.size(), what, fmt::join(names.begin(), end, ", "),
                     names.size() > kMostListed ? ", ..." : "");
}

// Reads one piece through a buffer, one hashed stretch after the other. Stretches from which
// nothing is needed are skipped.
class PieceReader {
 public:
  PieceReader(const std::string& folder, const std::string& name, const CheckpointPiece& piece)
      : file_(File::open_read(folder + "/" + piece.file)),
        name_(name),
        piece_(piece),
        buffer_(std::min(kPieceBytes, piece.bytes)) {
    stretch_bytes_ = piece.xxh3.size() == 1 ? piece.bytes : SafetensorsWriter::kHashedBytes;
  }

  void verify() {
    for (size_t i = 0; i < piece_.xxh3.size(); ++i) read_stretch(i, [](const std::byte*, int64_t, int64_t) {});
  }
  // dst[run.in_b...] = piece[run.in_a...], elements of that size.
  void copy(const std::vector<CommonRun>& runs, int64_t element_bytes, std::byte* dst) {
    size_t next = 0;  // the first run that has not ended
    for (size_t i = 0; i < piece_.xxh3.size() && next < runs.size(); ++i) {
      const int64_t end = std::min(piece_.bytes, static_cast<int64_t>(i + 1) * stretch_bytes_);
      if (runs[next].in_a * element_bytes >= end) continue;
      read_stretch(i, [&](const std::byte* bytes, int64_t begin, int64_t count) {
        next = scatter(runs, next, element_bytes, dst, bytes, begin, count);
      });
    }
  }

 private:
  // Copies the elements of bytes [begin, begin + count) of the piece that are in runs. Returns the
  // first run that continues.
  static size_t scatter(const std::vector<CommonRun>& runs, size_t next, int64_t element_bytes, std::byte* dst,
                        const std::byte* bytes, int64_t begin, int64_t count) {
    for (; next < runs.size(); ++next) {
      const int64_t run_begin = runs[next].in_a * element_bytes, run_end = run_begin + runs[next].count * element_bytes;
      const int64_t from = std::max(run_begin, begin), to = std::min(run_end, begin + count);
      if (from < to)
        std::memcpy(dst + runs[next].in_b * element_bytes + (from - run_begin), bytes + (from - begin), to - from);
      if (run_end > begin + count) break;
    }
    return next;
  }

  template <class Use>
  void read_stretch(size_t i, Use&& use) {
    const int64_t begin = static_cast<int64_t>(i) * stretch_bytes_,
                  end = std::min(piece_.bytes, begin + stretch_bytes_);
    Hasher hasher;
    for (int64_t at = begin; at < end; at += kPieceBytes) {
      const int64_t count = std::min(kPieceBytes, end - at);
      file_.read_at(buffer_.data(), count, piece_.offset + at);
      hasher.update(buffer_.data(), count);
      use(buffer_.data(), at, count);
    }
    const std::string hash = to_hex(hasher.digest());
    MOEBIUS_CHECK(
        input, hash == piece_.xxh3[i],
        "checkpoint {}: expected tensor \"{}\", {} bytes at {}, with XXH3 {}; got {}; the file is damaged, {}",
        file_.path(), slice_name(name_, piece_.slice), end - begin, piece_.offset + begin, piece_.xxh3[i], hash,
        kAdvice);
  }

  File file_;
  const std::string& name_;
  const CheckpointPiece& piece_;
  std::vector<std::byte> buffer_;
  int64_t stretch_bytes_ = 0;
};

}  // namespace

int64_t CheckpointTensor::num_bytes() const { return numel_of(shape) * size_of(dtype); }

CheckpointReader::CheckpointReader(const std::string& folder, bool check_files) : folder_(folder) {
  manifest_ = std::make_shared<const CheckpointManifest>(parse_manifest(read_manifest(folder), folder));
  check_complete(*manifest_, folder);
  if (!check_files) return;
  for (const auto& [name, file] : manifest_->files) check_file(folder, name, file);
}

int64_t CheckpointReader::step() const { return manifest_->step; }

int64_t CheckpointReader::num_ranks() const { return manifest_->num_ranks; }

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
                "checkpoint {}: expected a tensor \"{}\"; got none of that name among {}; it is of another model",
                folder_, name, manifest_->tensors.size());
  return it->second;
}

void CheckpointReader::copy_slice(const std::string& name, const TensorSlice& slice, std::byte* dst) const {
  const CheckpointTensor& t = at(name);
  for (const CheckpointPiece& piece : t.pieces) {
    const std::vector<CommonRun> runs = common_runs(piece.slice, slice);
    if (!runs.empty()) PieceReader(folder_, name, piece).copy(runs, size_of(t.dtype), dst);
  }
}

void CheckpointReader::verify(const std::string& name) const {
  for (const CheckpointPiece& piece : at(name).pieces) PieceReader(folder_, name, piece).verify();
}

void CheckpointReader::read(const std::string& name, const Tensor& into, Stream* s) const {
  read({.name = name, .tensor = into}, s);
}

void CheckpointReader::read(const NamedTensor& into, Stream* s) const {
  const auto& [name, tensor, slice, is_replica, converts] = into;
  MOEBIUS_CHECK(usage, tensor.device == (s ? s->device() : DeviceKind::cpu),
                "checkpoint: expected {} memory for \"{}\"; got {}; copy it after", s ? name_of(s->device()) : "CPU",
                name, name_of(tensor.device));
  MOEBIUS_CHECK(input, is_like(at(name), into),
                "checkpoint {}: expected \"{}\" to be {}; got {}; it is of another model", folder_, name, text_of(into),
                text_of(at(name)));
  if (tensor.empty()) return;  // a rank may own nothing of a tensor, and then has no memory for it
  const DType saved = at(name).dtype;
  if (tensor.device == DeviceKind::cpu && saved == tensor.dtype)
    return copy_slice(name, slice_of(into), static_cast<std::byte*>(tensor.data));
  std::vector<std::byte> bytes(bytes_of(saved, tensor.numel()));
  copy_slice(name, slice_of(into), bytes.data());
  if (saved != tensor.dtype) bytes = converted(bytes, saved, tensor.numel());
  if (tensor.device == DeviceKind::cpu) {
    std::memcpy(tensor.data, bytes.data(), bytes.size());
    return;
  }
  copy_to_device(*s, tensor.data, bytes.data(), tensor.num_bytes());
  synchronize(*s);
}

void CheckpointReader::check_names(const std::vector<NamedTensor>& into, const std::set<std::string>& asked) const {
  std::vector<std::string> missing, unexpected, different;
  for (const NamedTensor& t : into) {
    const auto it = manifest_->tensors.find(t.name);
    if (it == manifest_->tensors.end()) {
      missing.push_back(t.name);
    } else if (!is_like(it->second, t)) {
      different.push_back(fmt::format("{}: {} asked, {} saved", t.name, text_of(t), text_of(it->second)));
    }
  }
  for (const auto& [name, tensor] : manifest_->tensors) {
    if (!asked.contains(name)) unexpected.push_back(name);
  }
  MOEBIUS_CHECK(input, missing.empty() && unexpected.empty() && different.empty(),
                "checkpoint {}: expected exactly the {} tensors of this model; "
                "got{}{}{}; use the recipe that saved it or another folder",
                folder_, asked.size(), listed("missing", missing), listed("unexpected", unexpected),
                listed("different", different));
}

void CheckpointReader::read_all(const std::vector<NamedTensor>& into, Stream* s) const {
  std::set<std::string> asked;
  for (const NamedTensor& t : into) asked.insert(t.name);
  check_names(into, asked);
  for (const NamedTensor& t : into) read(t, s);
}

namespace {

// Every name that some rank asks for. The list is long: a rank has a name for each tensor of its
// share of the model.
std::set<std::string> names_of_all(Control& ranks, const std::vector<NamedTensor>& into) {
  std::string mine;
  for (const NamedTensor& t : into) mine += t.name + '\n';
  std::set<std::string> names;
  for (const std::string& text : ranks.gather(mine)) {
    std::istringstream lines(text);
    for (std::string name; std::getline(lines, name);) names.insert(name);
  }
  return names;
}

}  // namespace

// If the ranks together hold as many elements as the checkpoint, and each finds its own there,
// nothing is unexpected. Then their names need not be exchanged.
void CheckpointReader::read_all(Control& ranks, const std::vector<NamedTensor>& into, Stream* s) const {
  int64_t held = 0, saved = 0;
  for (const NamedTensor& t : into) held += t.is_replica ? 0 : t.tensor.numel();
  for (const auto& [name, tensor] : manifest_->tensors) saved += numel_of(tensor.shape);
  std::set<std::string> asked;
  if (ranks.sum(held) != saved) {
    asked = names_of_all(ranks, into);
  } else {
    for (const auto& [name, tensor] : manifest_->tensors) asked.insert(name);
  }
  ranks.together([&] { check_names(into, asked); });
  ranks.together([&] {
    for (const NamedTensor& t : into) read(t, s);
  });
}

}  // namespace moebius

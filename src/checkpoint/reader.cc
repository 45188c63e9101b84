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
#include "ops/optimizer/rounding.h"

namespace moebius {
namespace {

constexpr int64_t kPieceBytes = int64_t{4} << 20;  // hashed while still in the cache
constexpr size_t kMaxListed = 20;
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
  return fmt::format("{}[{}]", name_of(t.saved_dtype()), fmt::join(slice_of(t).shape, ", "));
}

bool is_like(const CheckpointTensor& saved, const NamedTensor& asked) {
  const TensorSlice slice = slice_of(asked);
  const bool is_narrowed = asked.converts && (saved.dtype == DType::f32 || saved.dtype == DType::bf16);
  const bool is_coded = asked.code && saved.dtype == DType::u8;
  return (saved.dtype == asked.saved_dtype() || is_narrowed || is_coded) && saved.shape == slice.shape &&
         slice.numel() == asked.tensor.numel();
}

// Returns the values in another dtype; codes of u8 are rounded to nearest, and get their scales.
std::vector<std::byte> as_dtype(const std::vector<float>& values, const NamedTensor& into, std::vector<float>& scales) {
  std::vector<std::byte> to(bytes_of(into.tensor.dtype, std::ssize(values)));
  if (into.tensor.dtype == DType::f32) {
    std::memcpy(to.data(), values.data(), to.size());
  } else if (into.tensor.dtype == DType::bf16) {
    auto* x = reinterpret_cast<bf16*>(to.data());
    for (size_t i = 0; i < values.size(); ++i) x[i] = to_bf16(values[i]);
  } else {
    scales.resize(values.size() / kCodeBlock);
    encode_blocks(*into.code, reinterpret_cast<uint8_t*>(to.data()), scales.data(), values.data(), nullptr,
                  std::ssize(values));
  }
  return to;
}

// Copies to memory of the stream's device, or of the CPU without a stream.
void fill(const Tensor& to, const void* from, Stream* s) {
  if (!s) {
    std::memcpy(to.data, from, to.num_bytes());
    return;
  }
  copy_to_device(*s, to.data, from, to.num_bytes());
  synchronize(*s);
}

// Splits values into a bf16 and its remainder.
void fill_halves(const NamedTensor& into, const std::vector<float>& values, Stream* s) {
  std::vector<bf16> weights(values.size());
  std::vector<uint16_t> remainders(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const WeightAndRemainder both = split(values[i]);
    weights[i] = both.weight;
    remainders[i] = both.remainder;
  }
  fill(into.tensor, weights.data(), s);
  fill(*into.remainder, remainders.data(), s);
}

// Returns whether the tensor of which these are the scales is saved as codes.
bool holds_codes(const CheckpointManifest& manifest, const std::string& scales_name) {
  const auto it = manifest.tensors.find(scales_name.substr(0, scales_name.size() - kScalesSuffix.size()));
  return it != manifest.tensors.end() && it->second.dtype == DType::u8;
}

// Returns a text such as "2 missing (a, b)"; empty without names.
std::string listed(const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return "";
  const auto end = names.begin() + std::min(names.size(), kMaxListed);
  return fmt::format(" {} {} ({}{})", names.size(), what, fmt::join(names.begin(), end, ", "),
                     names.size() > kMaxListed ? ", ..." : "");
}

// Reads one piece through a buffer, one stretch after the other. A stretch is what one hash of the piece covers;
// those from which nothing is needed are skipped.
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
    for (size_t i = 0; i < piece_.xxh3.size(); ++i) read_stretch(i, [](const Bytes&) {});
  }
  // Copies elements of that size of the piece: dst[run.in_b + i] = piece[run.in_a + i].
  void copy(const std::vector<CommonRun>& runs, int64_t element_bytes, std::byte* dst) {
    size_t next = 0;  // the first run that has not ended
    for (size_t i = 0; i < piece_.xxh3.size() && next < runs.size(); ++i) {
      const int64_t end = std::min(piece_.bytes, static_cast<int64_t>(i + 1) * stretch_bytes_);
      if (runs[next].in_a * element_bytes >= end) continue;
      read_stretch(i, [&](const Bytes& bytes) {
        for (; next < runs.size(); ++next) {
          copy_common(bytes, runs[next], element_bytes, dst);
          if ((runs[next].in_a + runs[next].count) * element_bytes > bytes.end()) break;  // the run continues
        }
      });
    }
  }

 private:
  // Bytes [begin, end()) of the piece, in the buffer.
  struct Bytes {
    const std::byte* data;
    int64_t begin, count;
    int64_t end() const { return begin + count; }
  };

  // Copies the elements of a run that are among these bytes.
  static void copy_common(const Bytes& bytes, const CommonRun& run, int64_t element_bytes, std::byte* dst) {
    const int64_t run_begin = run.in_a * element_bytes, run_end = run_begin + run.count * element_bytes;
    const int64_t from = std::max(run_begin, bytes.begin), to = std::min(run_end, bytes.end());
    if (from >= to) return;
    std::memcpy(dst + run.in_b * element_bytes + (from - run_begin), bytes.data + (from - bytes.begin), to - from);
  }

  // Calls use(bytes) for the bytes of a stretch, in order, and checks their hash at the end.
  template <class Use>
  void read_stretch(size_t i, Use&& use) {
    const int64_t begin = static_cast<int64_t>(i) * stretch_bytes_,
                  end = std::min(piece_.bytes, begin + stretch_bytes_);
    Hasher hasher;
    for (int64_t at = begin; at < end; at += kPieceBytes) {
      const int64_t count = std::min(kPieceBytes, end - at);
      file_.read_at(buffer_.data(), count, piece_.offset + at);
      hasher.update(buffer_.data(), count);
      use(Bytes{.data = buffer_.data(), .begin = at, .count = count});
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

void CheckpointReader::read_unchecked(const std::string& name, const TensorSlice& slice, void* dst) const {
  const CheckpointTensor& t = at(name);
  const int64_t size = size_of(t.dtype);
  for (const CheckpointPiece& piece : t.pieces) {
    const std::vector<CommonRun> runs = common_runs(piece.slice, slice);
    if (runs.empty()) continue;
    const File file = File::open_read(folder_ + "/" + piece.file);
    for (const CommonRun& run : runs)
      file.read_at(static_cast<std::byte*>(dst) + run.in_b * size, run.count * size, piece.offset + run.in_a * size);
  }
}

void CheckpointReader::verify(const std::string& name) const {
  for (const CheckpointPiece& piece : at(name).pieces) PieceReader(folder_, name, piece).verify();
}

void CheckpointReader::read(const std::string& name, const Tensor& into, Stream* s) const {
  read({.name = name, .tensor = into}, s);
}

namespace {

// Decodes a slice that has parts of blocks, with the scales of the whole tensor.
void decode_cut_blocks(BlockCode code, float* x, const uint8_t* codes, const float* scales, const TensorSlice& slice) {
  for (const CommonRun& run : common_runs(whole_slice(slice.shape), slice))
    for (int64_t i = 0; i < run.count; ++i)
      x[run.in_b + i] = decoded(code, kCodeValues, codes[run.in_b + i], scales[(run.in_a + i) / kCodeBlock]);
}

}  // namespace

// Returns the saved values in f32. A layout of the run may cut blocks of 8-bit codes that the checkpoint has whole.
std::vector<float> CheckpointReader::values_of(const NamedTensor& into) const {
  const CheckpointTensor& saved = at(into.name);
  const TensorSlice slice = slice_of(into);
  const int64_t n = slice.numel();
  std::vector<float> values(n);
  std::vector<std::byte> bytes(bytes_of(saved.dtype, n));
  copy_slice(into.name, slice, bytes.data());
  if (saved.dtype == DType::f32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
  } else if (saved.dtype == DType::bf16) {
    for (int64_t i = 0; i < n; ++i) values[i] = to_f32(reinterpret_cast<const bf16*>(bytes.data())[i]);
  } else {
    const bool cuts = cuts_block(slice);
    const TensorSlice of_scales = scales_slice(cuts ? whole_slice(slice.shape) : slice);
    std::vector<float> scales(of_scales.numel());
    copy_slice(into.name + std::string(kScalesSuffix), of_scales, reinterpret_cast<std::byte*>(scales.data()));
    const auto* codes = reinterpret_cast<const uint8_t*>(bytes.data());
    if (cuts)
      decode_cut_blocks(*into.code, values.data(), codes, scales.data(), slice);
    else
      decode_blocks(*into.code, values.data(), codes, scales.data(), n);
  }
  return values;
}

void CheckpointReader::read(const NamedTensor& into, Stream* s) const {
  const Tensor& tensor = into.tensor;
  MOEBIUS_CHECK(usage, tensor.device == (s ? s->device() : DeviceKind::cpu),
                "checkpoint: expected {} memory for \"{}\"; got {}; copy it after", s ? name_of(s->device()) : "CPU",
                into.name, name_of(tensor.device));
  if (into.is_scales && !tensors().contains(into.name)) return;
  MOEBIUS_CHECK(input, is_like(at(into.name), into),
                "checkpoint {}: expected \"{}\" to be {}; got {}; it is of another model", folder_, into.name,
                text_of(into), text_of(at(into.name)));
  if (tensor.empty()) return;  // a rank may own nothing of a tensor, and then has no memory for it
  const bool on_cpu = tensor.device == DeviceKind::cpu;
  if (into.remainder) return fill_halves(into, values_of(into), on_cpu ? nullptr : s);
  if (at(into.name).dtype == tensor.dtype) {
    if (on_cpu) return copy_slice(into.name, slice_of(into), static_cast<std::byte*>(tensor.data));
    std::vector<std::byte> bytes(tensor.num_bytes());
    copy_slice(into.name, slice_of(into), bytes.data());
    return fill(tensor, bytes.data(), s);
  }
  std::vector<float> scales;
  const std::vector<std::byte> bytes = as_dtype(values_of(into), into, scales);
  fill(tensor, bytes.data(), on_cpu ? nullptr : s);
  if (!scales.empty()) fill(into.scales, scales.data(), on_cpu ? nullptr : s);
}

namespace {

// Returns the names that may be saved: with a code, those of scales too.
std::vector<std::string> names_of(const std::vector<NamedTensor>& into) {
  std::vector<std::string> names;
  for (const NamedTensor& t : into) {
    names.push_back(t.name);
    if (t.code) names.push_back(t.name + std::string(kScalesSuffix));
  }
  return names;
}

}  // namespace

void CheckpointReader::check_names(const std::vector<NamedTensor>& into, const std::set<std::string>& asked) const {
  std::vector<std::string> missing, unexpected, different;
  for (const NamedTensor& t : into) {
    const auto it = manifest_->tensors.find(t.name);
    if (it == manifest_->tensors.end()) {
      if (t.is_scales && !holds_codes(*manifest_, t.name)) continue;
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
  const std::vector<std::string> names = names_of(into);
  const std::set<std::string> asked(names.begin(), names.end());
  check_names(into, asked);
  for (const NamedTensor& t : into) read(t, s);
}

namespace {

// Returns every name that some rank reads. The list is long, since a rank has a name for each tensor of its share of
// the model.
std::set<std::string> names_of_all(Control& ranks, const std::vector<NamedTensor>& into) {
  std::string mine;
  for (const std::string& name : names_of(into)) mine += name + '\n';
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

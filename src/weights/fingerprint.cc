#include "weights/fingerprint.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "io/convert_elements.h"

namespace moebius {
namespace {

constexpr int64_t kWholeElements = 4096;  // a tensor of at most so many is hashed whole
constexpr int64_t kPieceElements = 64, kElementsPerPiece = int64_t{4} << 20, kMinPieces = 2, kMaxPieces = 64;
constexpr size_t kDigits = 16;  // of half a hash

Hash128 sum(const Hash128& a, const Hash128& b) {
  Hash128 all{.high = a.high + b.high, .low = a.low + b.low};
  if (all.low < a.low) ++all.high;
  return all;
}

void add_text(Hasher& hasher, const std::string& text) { hasher.update(text.data(), std::ssize(text) + 1); }

WeightsFingerprint fingerprint_of_tensor(const WeightsReader& weights, size_t entry) {
  const WeightsEntry& e = weights.entries()[entry];
  Hasher values, exact;
  for (Hasher* hasher : {&values, &exact}) {
    add_text(*hasher, e.name);
    add_text(*hasher, to_string(e.shape));
  }
  add_text(exact, std::string(name_of(e.dtype)));
  TensorSlice slice = whole_slice(dims_of(e.shape));
  for (const ElementRange& range : sampled_elements(e.name, e.shape)) {
    slice.begin = range.begin;
    slice.end = range.end();
    std::vector<char> bytes(static_cast<size_t>(range.count * size_of(e.dtype)));
    std::vector<bf16> rounded(static_cast<size_t>(range.count));
    weights.read_sample(entry, slice, bytes.data());
    convert_elements(rounded.data(), DType::bf16, bytes.data(), e.dtype, range.count, e.name);
    exact.update(bytes.data(), std::ssize(bytes));
    values.update(rounded.data(), range.count * size_of(DType::bf16));
  }
  return {.values = values.digest(), .exact = exact.digest()};
}

}  // namespace

WeightsFingerprint operator+(const WeightsFingerprint& a, const WeightsFingerprint& b) {
  return {.values = sum(a.values, b.values), .exact = sum(a.exact, b.exact)};
}

std::vector<ElementRange> sampled_elements(const std::string& name, const Shape& shape) {
  const int64_t numel = shape.numel();
  if (numel <= kWholeElements) return {{.begin = 0, .count = numel}};
  const int64_t cols = shape[shape.rank() - 1], rows = numel / cols, width = std::min(kPieceElements, cols);
  const int64_t pieces = std::clamp(numel / kElementsPerPiece, kMinPieces, kMaxPieces), places = cols - width + 1;
  // Each piece has other columns, and each tensor too.
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15;
  uint64_t drawn = hash_bytes(name.data(), std::ssize(name)).low;
  std::vector<ElementRange> ranges;
  for (int64_t i = 0; i < pieces; ++i, drawn += kGoldenRatio) {
    const int64_t row = (2 * i + 1) * rows / (2 * pieces);
    const auto col = static_cast<int64_t>(drawn % static_cast<uint64_t>(places));
    ranges.push_back({.begin = row * cols + col, .count = width});
  }
  return ranges;
}

WeightsFingerprint fingerprint_of(const WeightsReader& weights, const ModelSpec& model, const TensorShare& share) {
  WeightsFingerprint all;
  for (size_t i = share.first; i < weights.entries().size(); i += share.step) {
    const std::string& name = weights.entries()[i].name;
    if (!is_training_state(name) && !is_of_mtp(name, model)) all = all + fingerprint_of_tensor(weights, i);
  }
  return all;
}

std::string to_text(const WeightsFingerprint& fingerprint) {
  return to_hex(fingerprint.values) + " " + to_hex(fingerprint.exact);
}

WeightsFingerprint parse_fingerprint(const std::string& text, const std::string& who) {
  WeightsFingerprint f;
  bool is_legal = text.size() == 4 * kDigits + 1 && text[2 * kDigits] == ' ';
  const auto read = [&](uint64_t* half, size_t at) {
    if (!is_legal) return;
    const char *begin = text.data() + at, *end = begin + kDigits;
    is_legal = std::from_chars(begin, end, *half, 16).ptr == end;
  };
  read(&f.values.high, 0);
  read(&f.values.low, kDigits);
  read(&f.exact.high, 2 * kDigits + 1);
  read(&f.exact.low, 3 * kDigits + 1);
  MOEBIUS_CHECK(input, is_legal,
                "{}: expected a fingerprint of weights, two words of {} hexadecimal digits; got \"{}\"; fetch the file "
                "again",
                who, 2 * kDigits, text.substr(0, 80));
  return f;
}

}  // namespace moebius

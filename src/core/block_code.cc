#include "core/block_code.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace moebius {

namespace {

// Finds code_below() with a table instead of a search. A bucket holds the floats with one exponent and the same kBits
// upper bits of the mantissa. The largest code at or below its first float is in `first`. A bucket has at most one
// code more, which static_assert checks below, so one comparison finds the code of any float in it.
template <int kNum>
struct CodeTable {
  static constexpr int kBits = 7, kShift = 23 - kBits;
  static constexpr int kBuckets = 24 << kBits;  // 1e-7 is in the 24th binade below 1

  float values[kNum + 1] = {};  // the last one is infinite
  uint8_t first[kBuckets + 1] = {};

  static constexpr int32_t kLowest = (127 << kBits) - kBuckets;  // the bits of the first bucket; 1.0 is the last
  static constexpr float begin_of(int bucket) { return std::bit_cast<float>((kLowest + bucket) << kShift); }

  constexpr explicit CodeTable(const float* from) {
    std::copy_n(from, kNum, values);
    values[kNum] = std::numeric_limits<float>::infinity();
    for (int i = 0, k = 0; i <= kBuckets; ++i) {
      while (k + 1 < kNum && from[k + 1] <= begin_of(i)) ++k;
      first[i] = static_cast<uint8_t>(k);
    }
  }

  // Returns whether no bucket has two codes after its first float, so that `below` is exact.
  constexpr bool is_exact() const {
    for (int i = 0; i < kBuckets; ++i)
      if (first[i + 1] > first[i] + 1) return false;
    return values[1] > begin_of(0);
  }

  int below(float x) const {
    const int32_t bucket = std::max((std::bit_cast<int32_t>(x) >> kShift) - kLowest, 0);
    const int k = first[bucket];
    return k + (values[k + 1] <= x ? 1 : 0);
  }
};
constexpr CodeTable<128> kWithSign(kCodeValues.with_sign);
constexpr CodeTable<256> kWithoutSign(kCodeValues.without_sign);
static_assert(kWithSign.is_exact() && kWithoutSign.is_exact());

// The codes of a block: those of encoded(), without its branches.
template <BlockCode code>
void encode_block(uint8_t* codes, const float* x, float scale, const uint32_t* draws) {
  const auto& table = []() -> const auto& {
    if constexpr (code == BlockCode::with_sign)
      return kWithSign;
    else
      return kWithoutSign;
  }
  ();
#pragma omp simd
  for (int64_t i = 0; i < kCodeBlock; ++i) {
    const float magnitude = std::abs(x[i]) / scale;
    const int k = table.below(magnitude);
    const float low = table.values[k], share = (magnitude - low) / (table.values[k + 1] - low);
    const int rounded = k + (share * 65536.0f > static_cast<float>(draws ? draws[i] : 0x8000u) ? 1 : 0);
    if constexpr (code == BlockCode::with_sign)
      codes[i] = static_cast<uint8_t>(rounded | (int{x[i] < 0} & int{rounded > 0}) << 7);
    else
      codes[i] = static_cast<uint8_t>(k > 0 ? rounded : magnitude > 0 ? 1 : 0);
  }
}

}  // namespace

void encode_blocks(BlockCode code, uint8_t* codes, float* scales, const float* x, const uint32_t* draws, int64_t n) {
  MOEBIUS_ASSERT(n % kCodeBlock == 0);
  for (int64_t begin = 0; begin < n; begin += kCodeBlock) {
    float scale = 0;
    bool finite = true;
    for (int64_t i = begin; i < begin + kCodeBlock; ++i) {
      scale = std::max(scale, std::abs(x[i]));
      finite = finite && std::isfinite(x[i]);
    }
    scales[begin / kCodeBlock] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
    const uint32_t* drawn = draws ? draws + begin : nullptr;
    if (!finite || scale == 0)
      std::fill_n(codes + begin, kCodeBlock, static_cast<uint8_t>(finite ? 0 : 0x7f));
    else if (code == BlockCode::with_sign)
      encode_block<BlockCode::with_sign>(codes + begin, x + begin, scale, drawn);
    else
      encode_block<BlockCode::without_sign>(codes + begin, x + begin, scale, drawn);
  }
}

void decode_blocks(BlockCode code, float* x, const uint8_t* codes, const float* scales, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = decoded(code, kCodeValues, codes[i], scales[i / kCodeBlock]);
}

bool has_code_blocks(const Shape& shape) {
  return shape.rank() >= 2 && shape.numel() > 0 && shape[shape.rank() - 1] % kCodeBlock == 0;
}

Shape code_scales_shape(const Shape& shape) {
  MOEBIUS_ASSERT(has_code_blocks(shape));
  const int64_t last = shape[shape.rank() - 1] / kCodeBlock;
  return shape.rank() == 2 ? Shape{shape[0], last} : Shape{shape[0], shape[1], last};
}

}  // namespace moebius

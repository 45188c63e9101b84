// The elements of two registers of floats at once. bf16 elements are unpacked and packed two per word, as even and odd
// ones: widening a register of halves takes a compiler five instructions, and unpacking a word of two takes
// one for each.
#pragma once

#include "ops/cpu/lanes.h"

namespace moebius::cpu {

struct LanePair {
  Lanes a, b;  // f32: the first and the last half; bf16: the even and the odd ones
};
constexpr int64_t kNumPaired = 2 * kNumLanes;

inline LanePair load_pair(const float* x) { return {.a = load_lanes(x), .b = load_lanes(x + kNumLanes)}; }
inline LanePair load_pair(const bf16* x) {
  LaneBits words;
  std::memcpy(&words, x, sizeof words);
  return {.a = lanes_of(words << 16), .b = lanes_of(words & 0xffff0000u)};
}

inline void store_pair(float* to, const LanePair& v) {
  store_lanes(to, v.a);
  store_lanes(to + kNumLanes, v.b);
}
// Returns the bits of to_bf16 in the high half of each lane; the low half is undefined. REQUIRES: every NaN is quiet,
// with zeros in its low half, as arithmetic on bf16 gives. Rounding then leaves it a NaN.
inline LaneBits high_bf16_bits(Lanes v) {
  const LaneBits u = bits_of(v);
  return u + (((u >> 16) & 1u) + 0x7fffu);
}
// REQUIRES: as high_bf16_bits.
inline void store_pair(bf16* to, const LanePair& v) {
  const LaneBits words = (high_bf16_bits(v.a) >> 16) | (high_bf16_bits(v.b) & 0xffff0000u);
  std::memcpy(to, &words, sizeof words);
}

}  // namespace moebius::cpu

// The floats of one register at once, for loops whose sums must stay in registers:
// sixteen with AVX-512, eight with AVX. They are as wide as the machine and no
// wider: g++ keeps a wider vector in memory, and compares it element by element.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace moebius::cpu {

constexpr int kLaneBytes = __BIGGEST_ALIGNMENT__;  // bytes of the widest register that -march has
using Lanes = float __attribute__((vector_size(kLaneBytes)));
constexpr int64_t kNumLanes = kLaneBytes / sizeof(float);
static_assert(kNumLanes == 4 || kNumLanes == 8 || kNumLanes == 16);

inline Lanes load_lanes(const float* x) {
  Lanes v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

inline Lanes load_lanes(const bf16* x) {
  uint16_t __attribute__((vector_size(kLaneBytes / 2))) half;
  std::memcpy(&half, x, sizeof half);
  using Words = uint32_t __attribute__((vector_size(kLaneBytes)));
  const Words words = __builtin_convertvector(half, Words) << 16;
  Lanes v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

// Returns the first n <= kNumLanes elements, the rest 0.
template <class T>
Lanes load_lanes(const T* x, int64_t n) {
  if (n == kNumLanes) return load_lanes(x);
  T part[kNumLanes] = {};
  std::memcpy(part, x, static_cast<size_t>(n) * sizeof(T));
  return load_lanes(part);
}

#ifdef __FMA__
constexpr bool kLanesFuse = true;
#else
constexpr bool kLanesFuse = false;  // x86-64-v2, and AVX of 2011 to 2013
#endif

// Returns a * b + c, with one rounding where the CPU has such an instruction. With * and + g++ decides for
// each loop whether it fuses them.
template <class V>
inline V multiply_add(V a, V b, V c) {
  if constexpr (kLanesFuse && sizeof(V) == 64)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else if constexpr (kLanesFuse && sizeof(V) == 32)
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else
    return a * b + c;
}

using LaneBits = uint32_t __attribute__((vector_size(kLaneBytes)));

inline LaneBits bits_of(Lanes v) {
  LaneBits b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}
inline Lanes lanes_of(LaneBits b) {
  Lanes v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

// Returns the bits that to_bf16 gives, in the low half of each lane.
inline LaneBits bf16_bits(Lanes v) {
  const LaneBits u = bits_of(v), rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  return (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded;
}

// Returns v rounded to T.
template <class T>
Lanes round_lanes(Lanes v);
template <>
inline Lanes round_lanes<float>(Lanes v) {
  return v;
}
template <>
inline Lanes round_lanes<bf16>(Lanes v) {
  return lanes_of(bf16_bits(v) << 16);
}

inline void store_lanes(float* to, Lanes v) { std::memcpy(to, &v, sizeof v); }
inline void store_lanes(bf16* to, Lanes v) {
  using Halves = uint16_t __attribute__((vector_size(kLaneBytes / 2)));
  const Halves half = __builtin_convertvector(bf16_bits(v), Halves);
  std::memcpy(to, &half, sizeof half);
}
// Stores the first n <= kNumLanes elements.
template <class T>
void store_lanes(T* to, Lanes v, int64_t n) {
  if (n == kNumLanes) return store_lanes(to, v);
  T part[kNumLanes];
  store_lanes(part, v);
  std::memcpy(to, part, static_cast<size_t>(n) * sizeof(T));
}

// Returns exp_f32 of each lane.
inline Lanes exp_lanes(Lanes x) {
  const Lanes low = x < -87.3f ? Lanes{} - 87.3f : x, clamped = low > 88.3f ? Lanes{} + 88.3f : low;
  const Lanes shifted = clamped * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
  const Lanes r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * lanes_of((bits_of(shifted) + 127u) << 23);
}

inline Lanes sigmoid_lanes(Lanes x) { return 1.0f / (1.0f + exp_lanes(-x)); }

inline float sum_lanes(Lanes v) {
  float x[kNumLanes];
  std::memcpy(x, &v, sizeof x);
  for (int64_t width = kNumLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}

}  // namespace moebius::cpu

// Sixteen floats at once, for loops whose sums must stay in registers. The compiler lowers them to what the machine
// has.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"

namespace moebius::cpu {

using Lanes = float __attribute__((vector_size(64)));
constexpr int64_t kNumLanes = 16;

inline Lanes load_lanes(const float* x) {
  Lanes v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

inline Lanes load_lanes(const bf16* x) {
  uint16_t __attribute__((vector_size(32))) half;
  std::memcpy(&half, x, sizeof half);
  using Words = uint32_t __attribute__((vector_size(64)));
  const Words words = __builtin_convertvector(half, Words) << 16;
  Lanes v;
  std::memcpy(&v, &words, sizeof v);
  return v;
}

// The first n < 16 elements, the rest 0.
template <class T>
Lanes load_lanes(const T* x, int64_t n) {
  T part[kNumLanes] = {};
  std::memcpy(part, x, static_cast<size_t>(n) * sizeof(T));
  return load_lanes(part);
}

inline float sum_lanes(Lanes v) {
  float x[kNumLanes];
  std::memcpy(x, &v, sizeof x);
  for (int64_t width = kNumLanes / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) x[i] += x[i + width];
  }
  return x[0];
}

}  // namespace moebius::cpu

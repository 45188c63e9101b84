// The factor of RMSNorm, for the CPU implementation of ops that normalise rows or heads.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"

namespace moebius::cpu {

// Returns 1 / sqrt(mean of the squares of x + eps), summed in f32.
template <class T>
float rstd_of(const T* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += to_f32(x[i]) * to_f32(x[i]);
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

}  // namespace moebius::cpu

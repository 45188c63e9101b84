// Arithmetic that compilers turn into vector code: branch-free, inline, the same bits in every lane
// and on every rerun.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/dtype.h"
#include "core/error.h"
#include "core/thread_pool.h"

namespace moebius::cpu {

// Returns e^x, within 2 ulp for x in [-87.3, 88.3]; clamped outside, so 0 is e^-87.3 = 1e-38 and nothing overflows. NaN
// gives a NaN. x = n ln 2 + r with |r| <= ln(2) / 2 (ln 2 in two parts, so that r is exact to f32), e^r by its Taylor
// polynomial to r^7 / 7!.
inline float exp_f32(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return p * std::bit_cast<float>(exponent);
}

inline float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// Returns the largest of n >= 1 numbers.
inline float max_of(const float* x, int64_t n) {
  float m = x[0];
#pragma omp simd reduction(max : m)
  for (int64_t i = 0; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// Calls fn(T{}) for the element type T of a dtype that ops compute in.
template <class F>
void with_float_type(DType dtype, F&& fn) {
  if (dtype == DType::bf16) return fn(bf16{});
  MOEBIUS_ASSERT(dtype == DType::f32);
  fn(float{});
}

// Computes sum[j] += sum over p of partial[p * ld + j], p in order: the second half of a reduction over fixed chunks.
inline void add_rows(ThreadPool& pool, float* sum, const float* partial, int64_t num_partials, int64_t width,
                     int64_t ld) {
  parallel_rows(pool, width, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < num_partials; ++p) {
#pragma omp simd
      for (int64_t j = begin; j < end; ++j) sum[j] += partial[p * ld + j];
    }
  });
}

}  // namespace moebius::cpu

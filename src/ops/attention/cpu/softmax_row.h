// The running softmax of a row of scores, which is computed tile by tile.
#pragma once

#include <algorithm>

#include "ops/attention/attention_tiles.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {

// Adds a row of scores to the running softmax. Probabilities (0 outside `seen`) are relative to the new maximum, and
// the old output is rescaled to it.
template <class T>
void softmax_row(T* probabilities, float* scores, Range seen, int64_t num_keys, float scale, float& max, float& sum,
                 float* out, int64_t width) {
  std::fill(probabilities, probabilities + seen.begin, T{});
  std::fill(probabilities + seen.end, probabilities + num_keys, T{});
  if (seen.size() == 0) return;
  const float new_max = std::max(max, scale * max_of(scores + seen.begin, seen.size()));
  // There are two loops, because GCC vectorises the exponentials better without narrow stores among them.
  float tile_sum = 0;
#pragma omp simd reduction(+ : tile_sum)
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    scores[j] = exp_f32(scale * scores[j] - new_max);
    tile_sum += scores[j];
  }
#pragma omp simd
  for (int64_t j = seen.begin; j < seen.end; ++j) probabilities[j] = from_f32<T>(scores[j]);
  const float correction = exp_f32(max - new_max);  // 1e-38 for the first tile, which multiplies 0
  max = new_max;
  sum = sum * correction + tile_sum;
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) out[c] *= correction;
}

}  // namespace moebius::cpu

// The Hadamard transform of 16 numbers, the same on every device: x diag(s) H / 4 with the signs s of
// TransformerEngine.
#pragma once

#include <cstdint>

namespace moebius {

inline constexpr int kHadamard = 16;

// The sign of x[i] before the transform.
constexpr bool is_negative_in_hadamard(int i) { return (0b1101011111101000u >> i & 1u) != 0; }

// Four rounds of sums and differences, and an exact product.
constexpr void hadamard(float* x) {
  for (int i = 0; i < kHadamard; ++i) x[i] = is_negative_in_hadamard(i) ? -x[i] : x[i];
  for (int step = 1; step < kHadamard; step *= 2) {
    for (int i = 0; i < kHadamard; ++i) {
      if (i & step) continue;
      const float sum = x[i] + x[i + step], difference = x[i] - x[i + step];
      x[i] = sum;
      x[i + step] = difference;
    }
  }
  for (int i = 0; i < kHadamard; ++i) x[i] *= 0.25f;
}

// The sign of x[j] in number k before the transform.
constexpr bool is_negative_in_undoing(int j, int k) {
  const int both = j & k, halves = both ^ both >> 2;
  return ((halves ^ halves >> 1) & 1) != 0;
}
constexpr float factor_of_undoing(int k) { return is_negative_in_hadamard(k) ? -0.25f : 0.25f; }

// Undoes it: each number is a sum in the order of x.
constexpr void undo_hadamard(float* x) {
  float before[kHadamard] = {};
  for (int k = 0; k < kHadamard; ++k) {
    float sum = 0;
    for (int j = 0; j < kHadamard; ++j) sum += is_negative_in_undoing(j, k) ? -x[j] : x[j];
    before[k] = factor_of_undoing(k) * sum;
  }
  for (int k = 0; k < kHadamard; ++k) x[k] = before[k];
}

}  // namespace moebius

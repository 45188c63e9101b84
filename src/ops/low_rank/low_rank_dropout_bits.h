// The arithmetic of low_rank_dropout.h that CPU and GPU share: nvcc compiles constexpr functions for both.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/low_rank/low_rank_dropout.h"

namespace moebius {

// Returns the threshold: an element is kept if its word of random bits is not below it.
inline uint32_t dropout_threshold(double rate) { return static_cast<uint32_t>(std::ldexp(rate, 32)); }

// Returns the first element of a row, counted over the tokens of a step, all experts and all columns. Two
// neighbours share the first two words of one draw.
constexpr uint64_t dropout_row(int64_t token, int64_t expert, int64_t num_experts, int64_t num_columns) {
  return static_cast<uint64_t>((token * num_experts + expert) * num_columns);
}

constexpr int64_t token_of(const TokenOfRow& t, int64_t row) {
  const int64_t r = t.first + row;
  if (t.cp == 1) return r;
  const int64_t piece = t.seq / 2, sequence = r / t.seq, at = r % t.seq;
  return sequence * t.seq * t.cp +
         (at < piece ? t.context * piece + at : (2 * t.cp - 1 - t.context) * piece + at - piece);
}

}  // namespace moebius

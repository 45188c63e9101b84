// The arithmetic of mx_rows.h that CPU and GPU share: nvcc compiles constexpr functions for both.
#pragma once

#include "core/quantized.h"
#include "ops/quantize/scales.h"

namespace moebius {

inline constexpr int kMxBlock = 32;

// The scale of a block, and its inverse.
struct MxScale {
  float scale, inverse;
};
constexpr MxScale mx_scale(uint32_t largest_bits) {
  const float scale = power_of_two_scale(largest_bits, top_exponent(DType::f8_e4m3));
  return {narrow_float::e8m0_value(to_e8m0(scale).bits), 1.0f / scale};
}

constexpr float mx_value(float x, MxScale of) {
  return narrow_float::f8_e4m3_value(to_f8_e4m3(x * of.inverse).bits) * of.scale;
}

// The block `index` of the rows of all experts, each of which begins at a multiple of a block.
struct MxRows {
  int64_t begin, count;  // the first row, and how many there are
};
constexpr MxRows mx_rows_of_block(const int32_t* offsets, int num_experts, int64_t R, int64_t index) {
  const int64_t place = index * kMxBlock;
  int64_t begin = place, end = R;
  if (offsets) {
    int low = 0, high = num_experts - 1;  // the last expert that begins at `place` or before
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (group_begin(offsets[middle], middle) <= place)
        low = middle;
      else
        high = middle - 1;
    }
    begin = offsets[low] + place - group_begin(offsets[low], low);
    end = offsets[low + 1];
  }
  const int64_t left = end - begin;
  return {begin, left < 0 ? 0 : left < kMxBlock ? left : kMxBlock};
}

constexpr int64_t num_mx_row_blocks(int64_t R, int64_t num_experts) {
  return (num_experts > 0 ? padded_rows(R, num_experts) : padded_rows(R)) / kMxBlock;
}

}  // namespace moebius

// The arithmetic of nv_rows.h that CPU and GPU share: nvcc compiles constexpr functions for both.
#pragma once

#include "ops/quantize/hadamard.h"
#include "ops/quantize/nv_rows.h"
#include "ops/quantize/scales.h"

namespace moebius {

inline constexpr int kNvBlock = 16;
static_assert(kNvBlock == kHadamard);

// The pointers and sizes of NvRows.
struct NvView {
  const void* x = nullptr;
  const int32_t *token = nullptr, *offsets = nullptr, *order = nullptr, *index = nullptr, *source = nullptr;
  const int64_t* draw = nullptr;  // [step, token of row 0]; may be null
  int64_t R = 0, C = 0, num_groups = 0, num_batches = 1, batch_tokens = 1;
  bool hadamard = false;

  // Row blocks: with hadamard each group has blocks of its own, else a block is a row.
  int64_t row_blocks() const { return hadamard ? R / kNvBlock + (num_groups > 0 ? num_groups : 1) : R; }
};

inline NvView view_of(const NvRows& a, const Tensor& draw_2) {
  const auto ints = [](const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); };
  return {.x = a.x_NC.data,
          .token = ints(a.token_R),
          .offsets = ints(a.offsets_g1),
          .order = ints(a.order_R),
          .index = ints(a.index_N),
          .source = ints(a.source_R),
          .draw = draw_2.empty() ? nullptr : draw_2.ptr<int64_t>(),
          .R = a.num_rows(),
          .C = a.x_NC.dim(1),
          .num_groups = a.offsets_g1.empty() ? 0 : a.offsets_g1.numel() - 1,
          .num_batches = a.num_batches,
          .batch_tokens = a.batch_tokens,
          .hadamard = a.hadamard};
}

constexpr int64_t nv_token(const NvView& a, int64_t row) {
  const int64_t from = a.source ? a.source[row] : row;
  if (a.index) return a.index[from];
  return (a.draw ? a.draw[1] : 0) + from;
}

// The memory of rows that no token was sent to may have any index.
constexpr int64_t nv_batch_of_token(int64_t token, int64_t batch_tokens, int64_t num_batches) {
  return token < 0 ? 0 : token / batch_tokens % num_batches;
}

constexpr int64_t nv_batch(const NvView& a, int64_t row) {
  return a.num_batches == 1 ? 0 : nv_batch_of_token(nv_token(a, row), a.batch_tokens, a.num_batches);
}

// The last group whose first(g) is at most `at`; first is ascending.
template <class First>
constexpr int64_t last_group(int64_t num_groups, int64_t at, First first) {
  int64_t low = 0, high = num_groups - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first(middle) <= at)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Places [begin, begin + count) in the order of rows. count is at most 16, and 0 for a block that has no rows.
struct NvRowBlock {
  int64_t begin = 0, group = 0;
  int count = 0;
};

constexpr NvRowBlock nv_row_block(const NvView& a, int64_t i) {
  const int64_t length = a.hadamard ? kNvBlock : 1;
  NvRowBlock b{.begin = i * length};
  int64_t end = a.R;
  if (a.offsets && a.hadamard) {
    const auto first = [&](int64_t g) { return (a.offsets[g] / kNvBlock + g) * kNvBlock; };
    b.group = last_group(a.num_groups, i * kNvBlock, first);
    b.begin = a.offsets[b.group] + i * kNvBlock - first(b.group);
    end = a.offsets[b.group + 1];
  } else if (a.offsets) {
    end = a.offsets[a.num_groups];
    b.group = last_group(a.num_groups, i, [&](int64_t g) { return int64_t{a.offsets[g]}; });
  }
  const int64_t left = end - b.begin;
  b.count = static_cast<int>(left < 0 ? 0 : left < length ? left : length);
  return b;
}

constexpr int64_t nv_row_at(const NvView& a, int64_t place) { return a.order ? a.order[place] : place; }
constexpr int64_t nv_row_of_x(const NvView& a, int64_t row) { return a.token ? a.token[row] : row; }

// The draws of a block of rows: index of the element in `column` of the whole matrix, in place j.
struct NvDrawRow {
  int64_t token = 0, expert = 0, num_experts = 1, columns = 1;
  constexpr uint64_t index(int j, int64_t column) const {
    return static_cast<uint64_t>(((token + j) * num_experts + expert) * columns + column);
  }
};

constexpr int64_t whole_column(const WholeColumns& columns, int64_t c) {
  int run = columns.num_runs - 1;
  while (run > 0 && columns.runs[run].here > c) --run;
  return columns.runs[run].whole + c - columns.runs[run].here;
}

constexpr uint32_t nv_largest_bits(const float* v) {
  uint32_t m = 0;
  for (int j = 0; j < kNvBlock; ++j) {
    const uint32_t bits = std::bit_cast<uint32_t>(v[j]) & 0x7fffffffu;
    m = bits > m ? bits : m;
  }
  return m;
}

struct NvStats {
  uint32_t elements = 0, saturated = 0, zeroed = 0;
  float smallest = 0, largest = 0;  // scales; 0: none yet
  constexpr void add(const NvStats& b) {
    elements += b.elements;
    saturated += b.saturated;
    zeroed += b.zeroed;
    if (b.largest == 0) return;
    smallest = smallest == 0 || b.smallest < smallest ? b.smallest : smallest;
    largest = b.largest > largest ? b.largest : largest;
  }
};

// The numbers of a block are multiplied with `inverse` before they are rounded, and their elements with `factor`.
struct NvBlockScale {
  float inverse, factor;
};
constexpr NvBlockScale nv_scale_of_block(uint32_t largest_bits, uint32_t tensor_bits) {
  const float encode = nv_encode_scale(tensor_bits), tensor_scale = 1.0f / encode;
  const f8_e4m3 scale = nv_block_scale(largest_bits, encode);
  return {nv_inverse(scale, tensor_scale), narrow_float::f8_e4m3_value(scale.bits) * tensor_scale};
}

constexpr float nv_value(uint8_t element, NvBlockScale scale) {
  return narrow_float::f4_e2m1_value(element & 15u) * scale.factor;
}

// Counts the number x, which became `value`.
constexpr void nv_count(NvStats& stats, float x, float value, NvBlockScale scale) {
  const float magnitude = x < 0 ? -x : x, factor = scale.factor;
  if (magnitude == 0) return;
  stats.add({.elements = 1,
             .saturated = magnitude > kE2m1Max * factor ? 1u : 0u,  // false if not finite: the scale is a NaN
             .zeroed = value == 0 ? 1u : 0u,
             .smallest = factor > 0 ? factor : 0,
             .largest = factor > 0 ? factor : 0});
}

}  // namespace moebius

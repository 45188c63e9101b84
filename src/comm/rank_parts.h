// Parts of tensors: those that each rank of a group sends, gets or keeps, and those that a rank sums.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "core/tensor.h"

namespace moebius {

struct Span {
  std::byte* data = nullptr;
  int64_t num_bytes = 0;
};
using Spans = std::vector<Span>;  // one per rank

// The parts of `count` ranks that one of them sums, in the order of their indices: its own, and those that arrived,
// stride_bytes apart.
struct RankParts {
  const void* own = nullptr;
  const void* arrived = nullptr;  // begins with the part of index 0; the place of own_rank is not read
  int64_t stride_bytes = 0;
  int own_rank = 0, count = 1;
  DType dtype = DType::f32;
  const void* at(int rank) const {
    return rank == own_rank ? own : static_cast<const std::byte*>(arrived) + rank * stride_bytes;
  }
};

inline Span span_of(const Tensor& x) { return {static_cast<std::byte*>(x.data), x.num_bytes()}; }

// Returns rank r's slice of n elements; the slices are as equal as possible.
inline Tensor slice_of(const Tensor& x_N, int r, int size) {
  const int64_t n = x_N.numel();
  return x_N.rows(n * r / size, n * (r + 1) / size);
}

inline Spans slices_of(const Tensor& x_N, int size) {
  Spans slices;
  for (int r = 0; r < size; ++r) slices.push_back(span_of(slice_of(x_N, r, size)));
  return slices;
}

// Returns the M rows of each rank, of [size * M, ...].
inline Spans blocks_of(const Tensor& x, int size) {
  Spans blocks;
  const int64_t M = x.dim(0) / size;
  for (int r = 0; r < size; ++r) blocks.push_back(span_of(x.rows(r * M, (r + 1) * M)));
  return blocks;
}

// Returns a run of counts[r] rows for each rank r; the runs follow each other.
inline Spans runs_of(const Tensor& x, std::span<const int64_t> counts) {
  int64_t row_bytes = size_of(x.dtype);
  for (int i = 1; i < x.shape.rank(); ++i) row_bytes *= x.dim(i);
  Spans runs;
  auto* at = static_cast<std::byte*>(x.data);
  for (const int64_t count : counts) {
    runs.push_back({.data = at, .num_bytes = count * row_bytes});
    at += runs.back().num_bytes;
  }
  return runs;
}

}  // namespace moebius

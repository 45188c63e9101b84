// Both passes of attention walk the score matrix on the CPU in tiles of queries times tiles of
// keys. This header has their sizes, and the keys that a query attends to.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tensor.h"
#include "ops/gemm/cpu/tile_gemm.h"

namespace moebius::cpu {

constexpr int64_t kQueryTile = 128;
constexpr int64_t kKeyTile = 256;

// [begin, end)
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
  Range within(Range other) const {
    const int64_t first = std::clamp(begin, other.begin, other.end);
    return {first, std::clamp(end, first, other.end)};
  }
};

struct Visibility {
  Tensor doc_start_T;
  int64_t rows, kv_rows;  // rows of one sequence
  int64_t window;
  int64_t q_first, kv_first;  // positions of its first query and key here

  // Returns the keys that query i of sequence b attends to.
  Range keys_of(int64_t b, int64_t i) const {
    const int64_t position = q_first + i;
    int64_t first = doc_start_T.empty() ? 0 : doc_start_T.ptr<int32_t>()[b * rows + i];
    if (window > 0) first = std::max(first, position - window + 1);
    return Range{first - kv_first, position + 1 - kv_first}.within({0, kv_rows});
  }
  // Returns a range with all keys that any of these queries attends to.
  Range keys_of(int64_t b, Range queries) const {
    Range all = keys_of(b, queries.end - 1);
    for (int64_t i = queries.begin; i < queries.end; ++i) all.begin = std::min(all.begin, keys_of(b, i).begin);
    return all;
  }
};

template <class Op>
Visibility visibility_of(const Op& a, const Tensor& q, const Tensor& k) {
  const int64_t rows = q.dim(0) / a.batch, kv_rows = k.dim(0) / a.batch;
  return {a.doc_start_T, rows, kv_rows, a.window, a.is_part ? a.q_first : kv_rows - rows, a.is_part ? a.kv_first : 0};
}

// Calls fn(keys) for the tiles of keys that cover `seen`, in order. Tiles begin at multiples of their size, so that few
// sizes occur.
template <class F>
void for_key_tiles(Range seen, F&& fn) {
  for (int64_t begin = seen.begin / kKeyTile * kKeyTile; begin < seen.end; begin += kKeyTile) {
    fn(Range{begin, std::min(begin + kKeyTile, seen.end)});
  }
}

// Returns the rows [row, ...) of head h of t [rows, heads, d] as a matrix.
inline Matrix head_of(const Tensor& t, int64_t row, int64_t h, bool transposed = false) {
  const int64_t ld = t.dim(1) * t.dim(2);
  return {static_cast<char*>(t.data) + (row * ld + h * t.dim(2)) * size_of(t.dtype), ld, t.dtype, transposed};
}

inline int64_t align64(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// Allocates arrays from a thread's slice of scratch; with a null base it only measures.
class Slice {
 public:
  explicit Slice(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t n) {
    T* p = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += align64(n * static_cast<int64_t>(sizeof(T)));
    return p;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

}  // namespace moebius::cpu

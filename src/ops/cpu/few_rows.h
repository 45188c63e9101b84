// Products of few rows of x with the rows of a matrix W, as in generation. W is read once and in place, since packing
// it would cost more than the product.
//   tile[i][j] = sum over k of x[i][k] w[j][k]
//
// Each sum runs over k in steps of a vector register, in one register, whose lanes are added at the end. So the bits of
// a row do not depend on the other rows, on their number, or on packing.
#pragma once

#include <cstdint>
#include <memory>

#include "core/dtype.h"

namespace moebius::cpu {

constexpr int64_t kRowsTogether = 4;  // rows of x in a kernel: more would need more registers than there are

// Rows of x: k elements each, one after the other, or as pack_few_rows lays them out.
struct FewRows {
  const void* data = nullptr;
  int64_t num_rows = 0, k = 0;
  bool packed = false;
};

// Returns the bytes of num_rows packed rows of k elements of a dtype.
int64_t packed_bytes(DType dtype, int64_t num_rows, int64_t k);

// Packs rows in groups of kRowsTogether, interleaved step by step. Then they are read as one
// stream, and do not conflict in the sets of a cache. `row` has num_rows pointers.
FewRows pack_few_rows(DType dtype, void* to, const void* const* row, int64_t num_rows, int64_t k);

// Computes n columns of a tile whose rows are ld apart. num_after: rows of W that come after these n and are
// read later. They are prefetched while the kernels compute.
template <class T>
void multiply_few_rows(float* tile, int64_t ld, const FewRows& x, const T* w, int64_t n, int64_t num_after);

}  // namespace moebius::cpu

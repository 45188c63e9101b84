// Products of few rows of x with the rows of a matrix W, as in generation. W is read once and in place, since packing
// it would cost more than the product.
//   tile[i][j] = sum over k of x[i][k] w[j][k]
//
// The bits of a row do not depend on the other rows, on their number, or on n. They depend on the instructions:
//   lanes   multiply-adds of f32, which every CPU has. A sum runs over k in steps of a register, in one register, whose
//           lanes are added at the end
//   pairs   avx512_bf16, for bf16: as lanes, with a pair of products to each lane
//   tiles   AMX, for bf16: products are summed as ops/cpu/few_rows_tiles.h describes
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace moebius::cpu {

enum class FewRowsMath { lanes, pairs, tiles };

// Returns whether this CPU has the instructions, and they multiply numbers of this dtype.
bool has_few_rows_math(FewRowsMath math, DType dtype);
// Returns the fastest of them.
FewRowsMath best_few_rows_math(DType dtype);

// Rows of x, packed by pack_few_rows.
struct FewRows {
  const void* data = nullptr;
  int64_t num_rows = 0, k = 0;
  FewRowsMath math = FewRowsMath::lanes;
};

constexpr int64_t kMaxFewRows = 32;

// Returns the bytes of num_rows packed rows of k elements of a dtype.
int64_t packed_bytes(DType dtype, int64_t num_rows, int64_t k, FewRowsMath math);

// Packs at most kMaxFewRows rows as kernels read them: as one stream, which does not conflict in the sets of a cache.
// `row` has num_rows pointers.
FewRows pack_few_rows(DType dtype, void* to, const void* const* row, int64_t num_rows, int64_t k, FewRowsMath math);

// Computes n columns of a tile whose rows are ld apart. num_after: rows of W that come after these n and are
// read later. They are prefetched while the kernels compute.
template <class T>
void multiply_few_rows(float* tile, int64_t ld, const FewRows& x, const T* w, int64_t n, int64_t num_after);

}  // namespace moebius::cpu

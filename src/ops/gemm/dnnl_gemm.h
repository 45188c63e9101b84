// One matrix product on the calling thread, by oneDNN. CPU only, for use inside pool tasks: teams belong to the pool,
// so the pool's setting of one OpenMP thread must hold where this is called.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace moebius::cpu {

// A matrix in memory: element (i, j) is at data[i * ld + j], or at data[j * ld + i] when transposed.
struct Matrix {
  void* data = nullptr;
  int64_t ld = 0;
  DType dtype = DType::f32;
  bool transposed = false;
};

// c[m, n] = a[m, k] b[k, n], or c += with accumulate. a and b of one dtype, f32 or bf16; c f32 or that dtype, not
// transposed. Sums in f32, rounded once. A row of c does not depend on m. k = 0 is not for here. Primitives are kept
// per thread by (m, n, k, leading dimensions, dtypes), the kMaxPrimitives used last: a new one costs about 0.1 ms, a
// kept one about 1 us. Callers with varying rows should cut them in few different sizes.
struct DnnlGemm {
  static constexpr int kMaxPrimitives = 512;
  Matrix c;     // out
  Matrix a, b;  // in
  int64_t m = 0, n = 0, k = 0;
  bool accumulate = false;
};
void dnnl_gemm(const DnnlGemm& g);

}  // namespace moebius::cpu

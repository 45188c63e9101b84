// RMS normalisation of rows that are `ld` elements apart: of ops/norm, and of ops/qk_norm, whose
// rows are parts of wider ones. Formulas and roundings are those of ops/norm/norm.h.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace moebius::cuda {

template <class T>
struct NormRowsFwd {
  T* y;
  T* sum = nullptr;       // only with residual
  float* rstd = nullptr;  // rstd of each row; may be left out
  const T* x;
  const T* residual = nullptr;
  const T* w;
  int64_t rows, width, ld;
  float eps;
};

// With rstd, dx is added to; without, rstd is recomputed from x with eps, and dx is
// overwritten. dw accumulates.
template <class T>
struct NormRowsBwd {
  T* dx;
  float *dw, *partial;  // [num_partials, width], rows ld_partial apart
  const T *dy, *x, *w;
  const float* rstd = nullptr;
  int64_t rows, width, ld, ld_partial, num_partials;
  float eps = 0;
};

// T: float or bf16. who: the op, for messages.
template <class T>
void norm_rows_fwd(Stream& s, const char* who, const NormRowsFwd<T>& a);
template <class T>
void norm_rows_bwd(Stream& s, const char* who, const NormRowsBwd<T>& a);

}  // namespace moebius::cuda

// A row of an RMS norm on one block. Formulas and roundings are those of ops/norm/norm.h.
#pragma once

#include "ops/cuda/vector.h"
#include "ops/norm/norm.h"

namespace moebius::cuda {

template <class T>
struct NormRowsFwd {
  T* y;
  T* sum = nullptr;  // only with residual
  float* rstd;       // of each row
  const T* x;
  const T* residual = nullptr;
  const T* w;
  int64_t rows, width;
  float eps;
};

constexpr int kMaxNormThreads = 512;
static_assert(kMaxGpuNormWidth == 32 * kMaxNormThreads);

// Threads for a row: 32 elements a thread keep enough loads in flight at the occupancy that their registers leave.
inline int norm_lanes(int64_t width) { return whole_warps(div_ceil(width, 32)); }

// Returns rstd of a row in the block's registers, with zeros past its width. shared: 32 numbers.
template <int kNum, int kVectors>
__device__ __forceinline__ float row_rstd(const float (&x)[kVectors][kNum], int64_t width, float eps, float* shared) {
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) squares += x[v][i] * x[v][i];
  }
  return 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(width) + eps);
}

// Row `index` of a. The first `lanes` threads of the block (whole warps) keep it in registers, kVectors times kNum
// elements a thread; the bits depend on their number, and not on that of the others. All threads of the block call it.
template <class T, int kNum, int kVectors>
__device__ __forceinline__ void norm_row_fwd(const NormRowsFwd<T>& a, int64_t index, int lanes, float* shared) {
  const int64_t row = index * a.width;
  const int lane = static_cast<int>(threadIdx.x);
  const auto column = [&](int v) { return (v * lanes + lane) * kNum; };
  const auto is_inside = [&](int v) { return lane < lanes && column(v) < a.width; };
  Raw<T, kNum> raw[kVectors], residual[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) raw[v] = fetch<kNum>(a.x + row + column(v), is_inside(v));
  if (a.residual) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) residual[v] = fetch<kNum>(a.residual + row + column(v), is_inside(v));
  }
  float x[kVectors][kNum];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    unpack<T>(x[v], raw[v]);
    if (!a.residual) continue;
    float term[kNum];
    unpack<T>(term, residual[v]);
#pragma unroll
    for (int i = 0; i < kNum; ++i) x[v][i] = rounded<T>(x[v][i] + term[i]);
    if (is_inside(v)) store(a.sum + row + column(v), x[v]);
  }
  const float rstd = row_rstd(x, a.width, a.eps, shared);
  if (threadIdx.x == 0) a.rstd[index] = rstd;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_inside(v)) continue;
    float w[kNum];
    load(w, a.w + column(v));
#pragma unroll
    for (int i = 0; i < kNum; ++i) w[i] *= rounded<T>(x[v][i] * rstd);
    store(a.y + row + column(v), w);
  }
}

}  // namespace moebius::cuda

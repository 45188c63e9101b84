#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/norm/cuda/norm_row.h"
#include "ops/norm/norm.h"
#include "ops/norm/norm_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kMaxThreads = kMaxNormThreads;

template <class T>
struct NormRowsBwd {
  T* dx;
  float* partial;  // [num_partials, width]
  const T *dy, *x, *w;
  const float* rstd;
  int64_t rows, width, num_partials;
};

// A block owns a row.
template <class T, int kNum, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_rows_fwd_kernel(NormRowsFwd<T> a) {
  __shared__ float shared[32];
  let_next_start();
  if (gridDim.x <= kEarlyRows && threadIdx.x * 32 < a.width) prefetch_line(a.w + threadIdx.x * 32);
  wait_for_inputs();
  norm_row_fwd<T, kNum, kVectors>(a, blockIdx.x, blockDim.x, shared);
}

// A block owns a chunk of rows, one after the other, and keeps its part of dw in registers. The next row is loaded
// while one is summed.
template <class T, int kNum, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_rows_bwd_kernel(NormRowsBwd<T> a) {
  __shared__ float shared[2][32];
  using Row = Raw<T, kNum>;
  const auto column = [](int v) { return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kNum; };
  const int64_t begin = blockIdx.x * a.rows / gridDim.x, end = (blockIdx.x + int64_t{1}) * a.rows / gridDim.x;
  Row next_x[kVectors], next_dy[kVectors], next_dx[kVectors];
  const auto fetch_row = [&](int64_t t) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool valid = column(v) < a.width && t < end;
      const int64_t at = t * a.width + column(v);
      next_x[v] = fetch<kNum>(a.x + at, valid);
      next_dy[v] = fetch<kNum>(a.dy + at, valid);
      next_dx[v] = fetch<kNum>(a.dx + at, valid);
    }
  };
  fetch_row(begin);
  float dw[kVectors][kNum] = {};
  for (int64_t t = begin; t < end; ++t) {
    float x[kVectors][kNum], dy[kVectors][kNum], mean = 0;
    Row old_dx[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) unpack<T>(x[v], next_x[v]);
    const float rstd = a.rstd[t];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kNum];
      unpack<T>(w, fetch<kNum>(a.w + column(v), column(v) < a.width));
      unpack<T>(dy[v], next_dy[v]);
      old_dx[v] = next_dx[v];
#pragma unroll
      for (int i = 0; i < kNum; ++i) {
        x[v][i] *= rstd;
        dw[v][i] += dy[v][i] * x[v][i];
        dy[v][i] *= w[i];
        mean += dy[v][i] * x[v][i];
      }
    }
    fetch_row(t + 1);
    mean = block_sum(mean, shared[t % 2]) / static_cast<float>(a.width);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float dx[kNum];
      unpack<T>(dx, old_dx[v]);
#pragma unroll
      for (int i = 0; i < kNum; ++i) dx[i] += rstd * (dy[v][i] - x[v][i] * mean);
      if (column(v) < a.width) store(a.dx + t * a.width + column(v), dx);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) < a.width) store(a.partial + blockIdx.x * a.width + column(v), dw[v]);
  }
}

template <class T, int kNum>
void fwd(const Stream& s, const NormRowsFwd<T>& a) {
  const auto rows = static_cast<unsigned>(narrow<int>(a.rows));
  const auto threads = static_cast<unsigned>(norm_lanes(a.width));
  launch_kernel(s, a.rows <= kEarlyRows, {.blocks = rows, .threads = threads}, norm_rows_fwd_kernel<T, kNum, 32 / kNum>,
                a);
}

template <class T, int kNum>
void bwd(cudaStream_t stream, const NormRowsBwd<T>& a) {
  const int blocks = narrow<int>(a.num_partials);
  if (a.width <= 16 * kMaxThreads) {
    const int threads = whole_warps(div_ceil(a.width, 16));
    norm_rows_bwd_kernel<T, kNum, 16 / kNum><<<blocks, threads, 0, stream>>>(a);
  } else {
    norm_rows_bwd_kernel<T, kNum, 32 / kNum><<<blocks, kMaxThreads, 0, stream>>>(a);
  }
}

void check_width(const char* who, int64_t width) {
  MOEBIUS_CHECK(usage, width <= kMaxGpuNormWidth, "{}: on a GPU rows are at most {} wide; got {}", who,
                kMaxGpuNormWidth, width);
}

// Returns whether rows of these arrays are read by vectors; if not, it notes the fallback.
template <class T, class... P>
bool takes_vectors(const Stream& s, const char* who, int64_t width, const P*... p) {
  const bool whole = width % kPerVector<T> == 0 && rows_are_aligned(width, sizeof(T), p...);
  if (!whole) note_odd_rows(s, who, dtype_of<T>, width);
  return whole;
}

}  // namespace

void rms_norm_fwd(Stream& s, const RmsNormFwd& a) {
  constexpr const char* who = "rms_norm_fwd";
  check_width(who, a.x_TD.dim(1));
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool residual = !a.residual_TD.empty();
    const NormRowsFwd<T> f{.y = a.y_TD.ptr<T>(),
                           .sum = residual ? a.sum_TD.ptr<T>() : nullptr,
                           .rstd = a.rstd_T.ptr<float>(),
                           .x = a.x_TD.ptr<T>(),
                           .residual = residual ? a.residual_TD.ptr<T>() : nullptr,
                           .w = a.w_D.ptr<T>(),
                           .rows = a.x_TD.dim(0),
                           .width = a.x_TD.dim(1),
                           .eps = a.eps};
    takes_vectors<T>(s, who, f.width, f.y, f.sum, f.x, f.residual, f.w) ? fwd<T, kPerVector<T>>(s, f) : fwd<T, 1>(s, f);
  });
  check_launch(who);
}

void rms_norm_bwd(Stream& s, const RmsNormBwd& a) {
  constexpr const char* who = "rms_norm_bwd";
  const int64_t width = a.x_TD.dim(1), num_partials = a.partial_PD.dim(0);
  const cudaStream_t stream = cuda_stream(s);
  check_width(who, width);
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const NormRowsBwd<T> b{.dx = a.dx_TD.ptr<T>(),
                           .partial = a.partial_PD.ptr<float>(),
                           .dy = a.dy_TD.ptr<T>(),
                           .x = a.x_TD.ptr<T>(),
                           .w = a.w_D.ptr<T>(),
                           .rstd = a.rstd_T.ptr<float>(),
                           .rows = a.x_TD.dim(0),
                           .width = width,
                           .num_partials = num_partials};
    takes_vectors<T>(s, who, width, b.dx, b.partial, b.dy, b.x, b.w) ? bwd<T, kPerVector<T>>(stream, b)
                                                                     : bwd<T, 1>(stream, b);
  });
  check_launch(who);
  add_rows(stream, {.sum = a.dw_D.ptr<float>(),
                    .partial = a.partial_PD.ptr<float>(),
                    .num_partials = num_partials,
                    .width = width,
                    .ld = width});
}

}  // namespace moebius::cuda

#include <type_traits>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/norm/cuda/norm_row.h"
#include "ops/norm/cuda/norm_rows.h"
#include "ops/norm/norm.h"
#include "ops/norm/norm_backends.h"

namespace moebius::cuda {
namespace {

constexpr int kMaxThreads = kMaxNormThreads;

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
// while one is summed. kKept: rstd is given and dx is added to; else both are computed here.
template <class T, int kNum, int kVectors, bool kKept>
__global__ void __launch_bounds__(kMaxThreads, 1) norm_rows_bwd_kernel(NormRowsBwd<T> a) {
  __shared__ float shared[2][32], shared_squares[2][32];
  using Row = Raw<T, kNum>;
  const auto column = [](int v) { return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kNum; };
  const int64_t begin = blockIdx.x * a.rows / gridDim.x, end = (blockIdx.x + int64_t{1}) * a.rows / gridDim.x;
  Row next_x[kVectors], next_dy[kVectors], next_dx[kVectors];
  const auto fetch_row = [&](int64_t t) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool valid = column(v) < a.width && t < end;
      const int64_t at = t * a.ld + column(v);
      next_x[v] = fetch<kNum>(a.x + at, valid);
      next_dy[v] = fetch<kNum>(a.dy + at, valid);
      if constexpr (kKept) next_dx[v] = fetch<kNum>(a.dx + at, valid);
    }
  };
  fetch_row(begin);
  float dw[kVectors][kNum] = {};
  for (int64_t t = begin; t < end; ++t) {
    float x[kVectors][kNum], dy[kVectors][kNum], mean = 0;
    Row old_dx[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) unpack<T>(x[v], next_x[v]);
    const float rstd = kKept ? a.rstd[t] : row_rstd(x, a.width, a.eps, shared_squares[t % 2]);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kNum];
      unpack<T>(w, fetch<kNum>(a.w + column(v), column(v) < a.width));
      unpack<T>(dy[v], next_dy[v]);
      if constexpr (kKept) old_dx[v] = next_dx[v];
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
      float dx[kNum] = {};
      if constexpr (kKept) unpack<T>(dx, old_dx[v]);
#pragma unroll
      for (int i = 0; i < kNum; ++i) dx[i] += rstd * (dy[v][i] - x[v][i] * mean);
      if (column(v) < a.width) store(a.dx + t * a.ld + column(v), dx);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) < a.width) store(a.partial + blockIdx.x * a.ld_partial + column(v), dw[v]);
  }
}

void check_width(const char* who, int64_t width) {
  MOEBIUS_CHECK(usage, width <= kMaxGpuNormWidth, "{}: on a GPU rows are at most {} wide; got {}", who,
                kMaxGpuNormWidth, width);
}

template <class T, int kNum>
void fwd(const Stream& s, const NormRowsFwd<T>& a) {
  const auto rows = static_cast<unsigned>(narrow<int>(a.rows));
  const auto threads = static_cast<unsigned>(norm_lanes(a.width));
  launch_kernel(s, a.rows <= kEarlyRows, {.blocks = rows, .threads = threads}, norm_rows_fwd_kernel<T, kNum, 32 / kNum>,
                a);
}

template <class T, int kNum, bool kKept>
void bwd(cudaStream_t stream, const NormRowsBwd<T>& a) {
  const int blocks = narrow<int>(a.num_partials);
  if (a.width <= 16 * kMaxThreads) {
    const int threads = whole_warps(div_ceil(a.width, 16));
    norm_rows_bwd_kernel<T, kNum, 16 / kNum, kKept><<<blocks, threads, 0, stream>>>(a);
  } else {
    norm_rows_bwd_kernel<T, kNum, 32 / kNum, kKept><<<blocks, kMaxThreads, 0, stream>>>(a);
  }
}

}  // namespace

template <class T>
void norm_rows_fwd(Stream& s, const char* who, const NormRowsFwd<T>& a) {
  check_width(who, a.width);
  const bool whole =
      a.width % kPerVector<T> == 0 && rows_are_aligned(a.ld, sizeof(T), a.y, a.sum, a.x, a.residual, a.w);
  if (!whole) note_odd_rows(s, who, dtype_of<T>, a.width);
  whole ? fwd<T, kPerVector<T>>(s, a) : fwd<T, 1>(s, a);
  check_launch(who);
}

template <class T>
void norm_rows_bwd(Stream& s, const char* who, const NormRowsBwd<T>& a) {
  check_width(who, a.width);
  const bool whole = a.width % kPerVector<T> == 0 && a.ld_partial % 4 == 0 &&
                     rows_are_aligned(a.ld, sizeof(T), a.dx, a.dy, a.x, a.w, a.partial);
  if (!whole) note_odd_rows(s, who, dtype_of<T>, a.width);
  const cudaStream_t stream = cuda_stream(s);
  const auto launch = [&](auto kept) {
    constexpr bool kKept = decltype(kept)::value;
    whole ? bwd<T, kPerVector<T>, kKept>(stream, a) : bwd<T, 1, kKept>(stream, a);
  };
  a.rstd ? launch(std::true_type{}) : launch(std::false_type{});
  check_launch(who);
  add_rows(stream,
           {.sum = a.dw, .partial = a.partial, .num_partials = a.num_partials, .width = a.width, .ld = a.ld_partial});
}

template void norm_rows_fwd(Stream&, const char*, const NormRowsFwd<float>&);
template void norm_rows_fwd(Stream&, const char*, const NormRowsFwd<bf16>&);
template void norm_rows_bwd(Stream&, const char*, const NormRowsBwd<float>&);
template void norm_rows_bwd(Stream&, const char*, const NormRowsBwd<bf16>&);

void rms_norm_fwd(Stream& s, const RmsNormFwd& a) {
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool residual = !a.residual_TD.empty();
    norm_rows_fwd<T>(s, "rms_norm_fwd",
                     {.y = a.y_TD.ptr<T>(),
                      .sum = residual ? a.sum_TD.ptr<T>() : nullptr,
                      .rstd = a.rstd_T.ptr<float>(),
                      .x = a.x_TD.ptr<T>(),
                      .residual = residual ? a.residual_TD.ptr<T>() : nullptr,
                      .w = a.w_D.ptr<T>(),
                      .rows = a.x_TD.dim(0),
                      .width = a.x_TD.dim(1),
                      .ld = a.x_TD.dim(1),
                      .eps = a.eps});
  });
}

void rms_norm_bwd(Stream& s, const RmsNormBwd& a) {
  const int64_t width = a.x_TD.dim(1);
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_rows_bwd<T>(s, "rms_norm_bwd",
                     {.dx = a.dx_TD.ptr<T>(),
                      .dw = a.dw_D.ptr<float>(),
                      .partial = a.partial_PD.ptr<float>(),
                      .dy = a.dy_TD.ptr<T>(),
                      .x = a.x_TD.ptr<T>(),
                      .w = a.w_D.ptr<T>(),
                      .rstd = a.rstd_T.ptr<float>(),
                      .rows = a.x_TD.dim(0),
                      .width = width,
                      .ld = width,
                      .ld_partial = width,
                      .num_partials = a.partial_PD.dim(0)});
  });
}

}  // namespace moebius::cuda

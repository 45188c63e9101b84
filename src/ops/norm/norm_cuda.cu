#include <algorithm>

#include "core/cuda.h"
#include "ops/backends.h"
#include "ops/cuda/add_rows.h"
#include "ops/cuda/vector.h"
#include "ops/norm/norm.h"

namespace moebius::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int64_t kMaxWidth = 32 * kMaxThreads;

template <class T>
struct Fwd {
  T *y, *sum;
  float* rstd;
  const T *x, *residual, *w;
  int64_t width;
  float eps;
};

// A block owns a row and keeps it in registers, kVectors times kNum elements a thread.
template <class T, int kNum, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) rms_norm_fwd_kernel(Fwd<T> a) {
  __shared__ float shared[32];
  const int64_t row = int64_t{blockIdx.x} * a.width;
  const auto column = [](int v) { return (v * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kNum; };
  Raw<T, kNum> raw[kVectors], residual[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) raw[v] = fetch<kNum>(a.x + row + column(v), column(v) < a.width);
  if (a.residual) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) residual[v] = fetch<kNum>(a.residual + row + column(v), column(v) < a.width);
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
    if (column(v) < a.width) store(a.sum + row + column(v), x[v]);
  }
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) squares += x[v][i] * x[v][i];
  }
  squares = block_sum(squares, shared);
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.width) + a.eps);
  if (threadIdx.x == 0) a.rstd[blockIdx.x] = rstd;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= a.width) continue;
    float w[kNum];
    load(w, a.w + column(v));
#pragma unroll
    for (int i = 0; i < kNum; ++i) w[i] *= rounded<T>(x[v][i] * rstd);
    store(a.y + row + column(v), w);
  }
}

template <class T>
struct Bwd {
  T* dx;
  float* partial;
  const T *dy, *x, *w;
  const float* rstd;
  int64_t rows, width;
};

// A block owns a chunk of rows, one after the other, and keeps its part of dw in registers. The next row is on its way
// while one is summed.
template <class T, int kNum, int kVectors>
__global__ void __launch_bounds__(kMaxThreads, 1) rms_norm_bwd_kernel(Bwd<T> a) {
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
    const float rstd = a.rstd[t];
    float x[kVectors][kNum], dy[kVectors][kNum], mean = 0;
    Row old_dx[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float w[kNum];
      unpack<T>(w, fetch<kNum>(a.w + column(v), column(v) < a.width));
      unpack<T>(x[v], next_x[v]);
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

void check_width(const char* who, int64_t width) {
  MOEBIUS_CHECK(usage, width <= kMaxWidth, "{}: on a GPU rows are at most {} wide; got {}", who, kMaxWidth, width);
}

// 32 elements a thread keep enough loads in flight at the occupancy that their registers leave.
template <class T, int kNum>
void fwd(Stream& s, const Fwd<T>& a, int64_t rows) {
  const int threads = whole_warps(div_ceil(a.width, 32));
  rms_norm_fwd_kernel<T, kNum, 32 / kNum><<<narrow<int>(rows), threads, 0, cuda_stream(s)>>>(a);
}

template <class T, int kNum>
void bwd(Stream& s, const Bwd<T>& a, int64_t num_partials) {
  const int blocks = narrow<int>(num_partials);
  if (a.width <= 16 * kMaxThreads) {
    const int threads = whole_warps(div_ceil(a.width, 16));
    rms_norm_bwd_kernel<T, kNum, 16 / kNum><<<blocks, threads, 0, cuda_stream(s)>>>(a);
  } else {
    rms_norm_bwd_kernel<T, kNum, 32 / kNum><<<blocks, kMaxThreads, 0, cuda_stream(s)>>>(a);
  }
}

}  // namespace

void rms_norm_fwd(Stream& s, const RmsNormFwd& a) {
  check_width("rms_norm_fwd", a.x_TD.dim(1));
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool residual = !a.residual_TD.empty();
    const Fwd<T> f{.y = a.y_TD.ptr<T>(),
                   .sum = residual ? a.sum_TD.ptr<T>() : nullptr,
                   .rstd = a.rstd_T.ptr<float>(),
                   .x = a.x_TD.ptr<T>(),
                   .residual = residual ? a.residual_TD.ptr<T>() : nullptr,
                   .w = a.w_D.ptr<T>(),
                   .width = a.x_TD.dim(1),
                   .eps = a.eps};
    if (rows_are_aligned(f.width, sizeof(T), f.y, f.sum, f.x, f.residual, f.w))
      fwd<T, kPerVector<T>>(s, f, a.x_TD.dim(0));
    else
      fwd<T, 1>(s, f, a.x_TD.dim(0));
  });
  check_launch("rms_norm_fwd");
}

void rms_norm_bwd(Stream& s, const RmsNormBwd& a) {
  const int64_t rows = a.x_TD.dim(0), width = a.x_TD.dim(1), num_partials = a.partial_PD.dim(0);
  check_width("rms_norm_bwd", width);
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const Bwd<T> b{.dx = a.dx_TD.ptr<T>(),
                   .partial = a.partial_PD.ptr<float>(),
                   .dy = a.dy_TD.ptr<T>(),
                   .x = a.x_TD.ptr<T>(),
                   .w = a.w_D.ptr<T>(),
                   .rstd = a.rstd_T.ptr<float>(),
                   .rows = rows,
                   .width = width};
    if (rows_are_aligned(width, sizeof(T), b.dx, b.dy, b.x, b.w, b.partial))
      bwd<T, kPerVector<T>>(s, b, num_partials);
    else
      bwd<T, 1>(s, b, num_partials);
  });
  check_launch("rms_norm_bwd");
  add_rows(cuda_stream(s), {.sum = a.dw_D.ptr<float>(),
                            .partial = a.partial_PD.ptr<float>(),
                            .num_partials = num_partials,
                            .width = width,
                            .ld = width});
}

}  // namespace moebius::cuda

// The rows of q and of k are parts of wider rows: ops/norm's kernels run over each, and
// v is copied. For few rows one kernel does it all, with the same bits.
#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/norm/cuda/norm_row.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/qk_norm/qk_norm_backends.h"

namespace moebius::cuda {
namespace {

template <class T>
void copy_v(cudaStream_t stream, T* to, const T* from, int64_t rows, int64_t B, int64_t C) {
  MOEBIUS_CUDA(
      cudaMemcpy2DAsync(to, C * sizeof(T), from, C * sizeof(T), B * sizeof(T), rows, cudaMemcpyDeviceToDevice, stream));
}

template <class T>
struct FewRows {
  NormRowsFwd<T> q, k;
  int q_lanes, k_lanes;
  T* v_to;
  const T* v_from;
};

// Blocks [row, part]: q, k or v of a row.
template <class T, int kNum>
__global__ void __launch_bounds__(kMaxNormThreads, 1) few_rows_kernel(FewRows<T> a) {
  __shared__ float shared[32];
  let_next_start();
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  if (blockIdx.y == 0) return norm_row_fwd<T, kNum, 32 / kNum>(a.q, row, a.q_lanes, shared);
  if (blockIdx.y == 1) return norm_row_fwd<T, kNum, 32 / kNum>(a.k, row, a.k_lanes, shared);
  for (int64_t i = threadIdx.x * kNum; i < a.k.width; i += int64_t{blockDim.x} * kNum) {
    const int64_t at = row * a.k.ld + i;
    *reinterpret_cast<Raw<T, kNum>*>(a.v_to + at) = fetch<kNum>(a.v_from + at);
  }
}

// Returns whether ops/norm would read the rows by vectors.
template <class T>
bool takes_vectors(const NormRowsFwd<T>& a) {
  return a.width % kPerVector<T> == 0 && rows_are_aligned(a.ld, sizeof(T), a.y, a.x, a.w);
}

// REQUIRES: q and k both take vectors, or neither does.
template <class T>
void few_rows(const Stream& s, const FewRows<T>& a) {
  const dim3 blocks(static_cast<unsigned>(a.q.rows), 3);
  const LaunchShape how{.blocks = blocks, .threads = static_cast<unsigned>(std::max(a.q_lanes, a.k_lanes))};
  constexpr int kNum = kPerVector<T>;
  const bool whole = takes_vectors(a.q);
  if (!whole) note_odd_rows(s, "qk_norm_fwd", dtype_of<T>, a.q.width);
  whole ? launch_kernel(s, true, how, few_rows_kernel<T, kNum>, a)
        : launch_kernel(s, true, how, few_rows_kernel<T, 1>, a);
}

}  // namespace

void qk_norm_fwd(Stream& s, const QkNormFwd& a) {
  const int64_t rows = a.x_TC.dim(0), A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B;
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto part = [&](int64_t begin, const Tensor& w) {
      return NormRowsFwd<T>{.y = a.y_TC.ptr<T>() + begin,
                            .x = a.x_TC.ptr<T>() + begin,
                            .w = w.ptr<T>(),
                            .rows = rows,
                            .width = w.numel(),
                            .ld = C,
                            .eps = a.eps};
    };
    const NormRowsFwd<T> q = part(0, a.q_norm_A), k = part(A, a.k_norm_B);
    if (rows <= kEarlyRows && std::max(A, B) <= kMaxGpuNormWidth && takes_vectors(q) == takes_vectors(k)) {
      return few_rows<T>(s, {.q = q,
                             .k = k,
                             .q_lanes = norm_lanes(A),
                             .k_lanes = norm_lanes(B),
                             .v_to = a.y_TC.ptr<T>() + A + B,
                             .v_from = a.x_TC.ptr<T>() + A + B});
    }
    norm_rows_fwd<T>(s, "qk_norm_fwd", q);
    norm_rows_fwd<T>(s, "qk_norm_fwd", k);
    copy_v(cuda_stream(s), a.y_TC.ptr<T>() + A + B, a.x_TC.ptr<T>() + A + B, rows, B, C);
  });
}

void qk_norm_bwd(Stream& s, const QkNormBwd& a) {
  const int64_t rows = a.x_TC.dim(0), A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B;
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto norm = [&](int64_t begin, const Tensor& dw, const Tensor& w) {
      norm_rows_bwd<T>(s, "qk_norm_bwd",
                       {.dx = a.dx_TC.ptr<T>() + begin,
                        .dw = dw.ptr<float>(),
                        .partial = a.partial_PW.ptr<float>() + begin,
                        .dy = a.dy_TC.ptr<T>() + begin,
                        .x = a.x_TC.ptr<T>() + begin,
                        .w = w.ptr<T>(),
                        .rows = rows,
                        .width = w.numel(),
                        .ld = C,
                        .ld_partial = A + B,
                        .num_partials = a.partial_PW.dim(0),
                        .eps = a.eps});
    };
    norm(0, a.dq_norm_A, a.q_norm_A);
    norm(A, a.dk_norm_B, a.k_norm_B);
    copy_v(cuda_stream(s), a.dx_TC.ptr<T>() + A + B, a.dy_TC.ptr<T>() + A + B, rows, B, C);
  });
}

}  // namespace moebius::cuda

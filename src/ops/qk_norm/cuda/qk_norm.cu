// The rows of q and of k are parts of wider rows: ops/norm's kernels run over each, and
// v is copied.
#include "device/cuda/cuda.h"
#include "ops/cuda/vector.h"
#include "ops/norm/cuda/norm_rows.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/qk_norm/qk_norm_backends.h"

namespace moebius::cuda {
namespace {

template <class T>
void copy_v(cudaStream_t stream, T* to, const T* from, int64_t rows, int64_t B, int64_t C) {
  MOEBIUS_CUDA(
      cudaMemcpy2DAsync(to, C * sizeof(T), from, C * sizeof(T), B * sizeof(T), rows, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace

void qk_norm_fwd(Stream& s, const QkNormFwd& a) {
  const int64_t rows = a.x_TC.dim(0), A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B;
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto norm = [&](int64_t begin, const Tensor& w) {
      norm_rows_fwd<T>(s, "qk_norm_fwd",
                       {.y = a.y_TC.ptr<T>() + begin,
                        .x = a.x_TC.ptr<T>() + begin,
                        .w = w.ptr<T>(),
                        .rows = rows,
                        .width = w.numel(),
                        .ld = C,
                        .eps = a.eps});
    };
    norm(0, a.q_norm_A);
    norm(A, a.k_norm_B);
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

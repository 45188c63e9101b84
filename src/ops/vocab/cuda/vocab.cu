#include <algorithm>

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/cuda/vector.h"
#include "ops/gemm/gemm.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/vocab/cuda/loss_row.h"
#include "ops/vocab/vocab.h"
#include "ops/vocab/vocab_backends.h"

namespace moebius::cuda {
namespace {

// A block owns a row of logits. It reads the row once, or twice where its registers do not hold it (kVectors 0).
template <int kNum, int kVectors, class T>
__global__ void __launch_bounds__(kLossThreads) block_loss_rows_kernel(LossRows<T> a) {
  constexpr Team kAlone{0, 1};
  const int64_t row = blockIdx.x;
  if (a.weight[row] == 0) return skip_row<kNum>(a, row, kAlone);
  loss_of_row<kNum, kVectors>(a, row, kAlone, [](const LossPart& mine) { return mine; });
}

template <class T>
void loss_rows(Stream& s, const LossRows<T>& a, int64_t rows) {
  const bool aligned =
      rows_are_aligned(a.vocab, 4, a.logits) && reinterpret_cast<uintptr_t>(a.dlogits) % (4 * sizeof(T)) == 0;
  if (uses_hopper_kernels(s)) return hopper_loss_rows(s, a, rows, aligned);
  constexpr int kVectors = 16;
  const bool holds = a.vocab <= kLossThreads * kVectors * (aligned ? 4 : 1);
  const auto kernel = aligned ? holds ? block_loss_rows_kernel<4, kVectors, T> : block_loss_rows_kernel<4, 0, T>
                      : holds ? block_loss_rows_kernel<1, kVectors, T>
                              : block_loss_rows_kernel<1, 0, T>;
  kernel<<<narrow<int>(rows), kLossThreads, 0, cuda_stream(s)>>>(a);
  check_launch("lm_loss");
}

}  // namespace

void lm_loss(Stream& s, const LmLoss& a) {
  note_odd_vocab(s, "lm_loss", a.x_TD.dtype, a.w_VD.dim(0));
  const int64_t tokens = a.x_TD.dim(0), chunk = a.logits_CV.dim(0);
  const bool grads = !a.dx_TD.empty();
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t end = std::min(tokens, begin + chunk);
    const Tensor x = a.x_TD.rows(begin, end), logits = a.logits_CV.rows(0, end - begin);
    cuda::gemm(s, {.c_MN = logits, .a = x, .b = a.w_VD, .trans_b = true});
    with_float_type(x.dtype, [&](auto zero) {
      using T = decltype(zero);
      loss_rows<T>(s,
                   {.loss = a.loss_T.ptr<float>() + begin,
                    .dlogits = grads ? a.dlogits_CV.ptr<T>() : nullptr,
                    .logits = logits.ptr<float>(),
                    .weight = a.weight_T.ptr<float>() + begin,
                    .scale_in_memory = a.scale_1.empty() ? nullptr : a.scale_1.ptr<float>(),
                    .target = a.target_T.ptr<int32_t>() + begin,
                    .vocab = narrow<int>(a.w_VD.dim(0)),
                    .scale = a.scale},
                   end - begin);
    });
    if (!grads) continue;
    const Tensor dlogits = a.dlogits_CV.rows(0, end - begin);
    cuda::gemm(s, {.c_MN = a.dx_TD.rows(begin, end), .a = dlogits, .b = a.w_VD});
    if (!a.dw_VD.empty()) cuda::gemm(s, {.c_MN = a.dw_VD, .a = dlogits, .b = x, .trans_a = true, .accumulate = true});
  }
}

}  // namespace moebius::cuda

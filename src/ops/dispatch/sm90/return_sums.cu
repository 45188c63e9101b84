#include "ops/dispatch/cuda/return_sums.h"

#include "ops/dispatch/sm90/return_sums_kernel.h"

namespace moebius::cuda {

void pipelined_sums(Stream& s, const Tensor& y_RD, int64_t max_rows, const Return& a, const Windows& to) {
  using S = SumShape<16, 3, 8>;
  constexpr auto kBytes = static_cast<int>(sizeof(S::Shared));
  const auto row_bytes = static_cast<uint32_t>(narrow<int>(y_RD.dim(1) * size_of(y_RD.dtype)));
  const Grid grid(s, max_rows, S::kWarps * 32, kBytes);
  with_float_type(y_RD.dtype, [&](auto zero) {
    const auto kernel = pipelined_sums_kernel<decltype(zero), S>;
    MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    grid.launch(kernel, static_cast<const char*>(y_RD.data), row_bytes, a, to);
  });
  check_launch("return_sums");
}

}  // namespace moebius::cuda

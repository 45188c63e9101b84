#include "ops/dispatch/sm90/push_rows_kernel.h"

namespace moebius::cuda {

void push_rows_by_engine(Stream& s, const Push& a, const Windows& to) {
  using S = PushShape<4, 12, 6, 16>;
  constexpr auto kBytes = static_cast<int>(sizeof(S::Shared));
  const auto kernel = engine_push_kernel<S>;
  MOEBIUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  Grid(s, a.num_tokens, S::kThreads, kBytes).launch(kernel, a, to);
  check_launch("push_rows");
}

}  // namespace moebius::cuda

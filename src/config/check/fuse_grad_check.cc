#include "config/check/fuse_grad_check.h"

#include "config/check/run_check_keys.h"
#include "core/error.h"

namespace moebius {

// Hopper's kernels of expert_wgrad add to sums in bf16 (ops/experts/experts.h).
void check_fuse_grad(const RunSpec& s) {
  if (s.device != DeviceKind::cuda || !s.optimizer.fuse_grad) return;
  constexpr int64_t kMaxExperts = 512, kColumns = 8;
  const ParallelSpec& p = s.parallel;
  const int64_t D = s.model.hidden_size, F = s.model.moe_intermediate_size / p.etp, E = s.model.num_experts / p.ep;
  MOEBIUS_CHECK(
      usage, s.kernels == KernelChoice::automatic && D % kColumns == 0 && F % kColumns == 0 && E <= kMaxExperts,
      "optimizer.fuse_grad = true needs Hopper's kernels, which run.kernels = \"portable\" leaves out, widths "
      "of experts in multiples of {}, and at most {} experts on a rank; got widths of {} and {}, and {} "
      "experts; remove fuse_grad{}",
      kColumns, kMaxExperts, D, F, E, origin(s, "optimizer.fuse_grad"));
}

}  // namespace moebius

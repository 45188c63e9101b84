// The MoE ops of the CUDA backend in a build without CUDA: every op says so.
#include "core/error.h"
#include "ops/backends_moe.h"

namespace moebius::cuda {
namespace {

[[noreturn]] void missing(const char* op) {
  MOEBIUS_FAIL(usage, "{}: this build has no CUDA backend; set run.device = \"cpu\"", op);
}

}  // namespace

void combine(Stream&, const Combine&) { missing("combine"); }
void pairs_to_rows(Stream&, const PairsToRows&) { missing("pairs_to_rows"); }
void rows_to_pairs(Stream&, const RowsToPairs&) { missing("rows_to_pairs"); }
void route_fwd(Stream&, const RouteFwd&) { missing("route_fwd"); }
void route_bwd(Stream&, const RouteBwd&) { missing("route_bwd"); }
void balance_stats(Stream&, const BalanceStats&) { missing("balance_stats"); }
void balance_loss(Stream&, const BalanceLoss&) { missing("balance_loss"); }
void update_expert_bias(Stream&, Tensor, Tensor, float) { missing("update_expert_bias"); }
void router_logits_fwd(Stream&, const RouterLogitsFwd&) { missing("router_logits_fwd"); }
void router_logits_bwd(Stream&, const RouterLogitsBwd&) { missing("router_logits_bwd"); }
void expert_up(Stream&, const ExpertUp&) { missing("expert_up"); }
void expert_down(Stream&, const ExpertDown&) { missing("expert_down"); }
void d_expert_down(Stream&, const DExpertDown&) { missing("d_expert_down"); }
void d_expert_up(Stream&, const DExpertUp&) { missing("d_expert_up"); }
void expert_wgrad(Stream&, const ExpertWgrad&) { missing("expert_wgrad"); }

}  // namespace moebius::cuda

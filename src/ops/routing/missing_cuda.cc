// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/routing/router_logits_few_backends.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {

void route_fwd(Stream&, const RouteFwd&) { missing_cuda("route_fwd"); }
void route_bwd(Stream&, const RouteBwd&) { missing_cuda("route_bwd"); }
void balance_stats(Stream&, const BalanceStats&) { missing_cuda("balance_stats"); }
void balance_loss(Stream&, const BalanceLoss&) { missing_cuda("balance_loss"); }
void update_expert_bias(Stream&, Tensor, Tensor, float) { missing_cuda("update_expert_bias"); }
void router_logits_fwd(Stream&, const RouterLogitsFwd&) { missing_cuda("router_logits_fwd"); }
void router_logits_few(Stream&, const RouterLogitsFwd&) { missing_cuda("router_logits_fwd"); }
void router_logits_bwd(Stream&, const RouterLogitsBwd&) { missing_cuda("router_logits_bwd"); }

}  // namespace moebius::cuda

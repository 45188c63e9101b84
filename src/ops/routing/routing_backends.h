// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

struct RouteFwd;
struct RouteBwd;
struct BalanceStats;
struct BalanceLoss;
struct RouterLogitsFwd;
struct RouterLogitsBwd;

namespace cpu {
void route_fwd(Stream& s, const RouteFwd& a);
void route_bwd(Stream& s, const RouteBwd& a);
void balance_stats(Stream& s, const BalanceStats& a);
void balance_loss(Stream& s, const BalanceLoss& a);
void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate);
void router_logits_fwd(Stream& s, const RouterLogitsFwd& a);
void router_logits_bwd(Stream& s, const RouterLogitsBwd& a);
}  // namespace cpu

namespace cuda {
void route_fwd(Stream& s, const RouteFwd& a);
void route_bwd(Stream& s, const RouteBwd& a);
void balance_stats(Stream& s, const BalanceStats& a);
void balance_loss(Stream& s, const BalanceLoss& a);
void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate);
void router_logits_fwd(Stream& s, const RouterLogitsFwd& a);
void router_logits_bwd(Stream& s, const RouterLogitsBwd& a);
}  // namespace cuda

}  // namespace moebius

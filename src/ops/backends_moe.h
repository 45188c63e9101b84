// The private list of what each device implements for the MoE ops. Arguments are checked before these are called, and
// there is work to do.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

struct Combine;
struct GatherRows;
struct PairsToRows;
struct RowsToPairs;
struct IndexRows;
struct IndexArrivals;
struct RouteFwd;
struct RouteBwd;
struct BalanceStats;
struct BalanceLoss;
struct RouterLogitsFwd;
struct RouterLogitsBwd;
struct ExpertUp;
struct ExpertDown;
struct DExpertDown;
struct DExpertUp;
struct ExpertWgrad;
struct ExpertBiasGrad;

namespace cpu {
void combine(Stream& s, const Combine& a);
void gather_rows(Stream& s, const GatherRows& a);
void pairs_to_rows(Stream& s, const PairsToRows& a);
void rows_to_pairs(Stream& s, const RowsToPairs& a);
void index_rows(Stream& s, const IndexRows& a);
void index_arrivals(Stream& s, const IndexArrivals& a);
void route_fwd(Stream& s, const RouteFwd& a);
void route_bwd(Stream& s, const RouteBwd& a);
void balance_stats(Stream& s, const BalanceStats& a);
void balance_loss(Stream& s, const BalanceLoss& a);
void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate);
void router_logits_fwd(Stream& s, const RouterLogitsFwd& a);
void router_logits_bwd(Stream& s, const RouterLogitsBwd& a);
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);
void expert_bias_grad(Stream& s, const ExpertBiasGrad& a);
int64_t scratch_bytes(const ExpertUp& a, int num_threads);
int64_t scratch_bytes(const ExpertDown& a, int num_threads);
int64_t scratch_bytes(const DExpertDown& a, int num_threads);
int64_t scratch_bytes(const DExpertUp& a, int num_threads);
int64_t scratch_bytes(const ExpertWgrad& a, int num_threads);
}  // namespace cpu

namespace cuda {
void combine(Stream& s, const Combine& a);
void gather_rows(Stream& s, const GatherRows& a);
void pairs_to_rows(Stream& s, const PairsToRows& a);
void rows_to_pairs(Stream& s, const RowsToPairs& a);
void index_rows(Stream& s, const IndexRows& a);
void index_arrivals(Stream& s, const IndexArrivals& a);
void route_fwd(Stream& s, const RouteFwd& a);
void route_bwd(Stream& s, const RouteBwd& a);
void balance_stats(Stream& s, const BalanceStats& a);
void balance_loss(Stream& s, const BalanceLoss& a);
void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate);
void router_logits_fwd(Stream& s, const RouterLogitsFwd& a);
void router_logits_bwd(Stream& s, const RouterLogitsBwd& a);
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);
void expert_bias_grad(Stream& s, const ExpertBiasGrad& a);
int64_t scratch_bytes(const ExpertUp& a);
int64_t scratch_bytes(const ExpertDown& a);
int64_t scratch_bytes(const DExpertDown& a);
int64_t scratch_bytes(const DExpertUp& a);
int64_t scratch_bytes(const ExpertWgrad& a);
}  // namespace cuda

}  // namespace moebius

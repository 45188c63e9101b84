#include "ops/routing/routing.h"

#include "ops/elementwise/elementwise.h"
#include "ops/op_checks.h"
#include "ops/routing/cpu/routing.h"
#include "ops/routing/cuda/router_logits.h"
#include "ops/routing/cuda/routing.h"
#include "ops/routing/router_logits_few.h"
#include "ops/routing/router_logits_few_backends.h"
#include "ops/routing/routing_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

void check_logits(const char* who, const Tensor& logits) {
  MOEBIUS_CHECK(usage, logits.shape.rank() == 2, "{}: logits must be f32 [T, E]; got {}", who, to_string(logits));
  check_tensor(who, "logits", logits, DType::f32, logits.shape);
  MOEBIUS_CHECK(usage, 1 <= logits.dim(1) && logits.dim(1) <= kMaxExperts,
                "{}: the number of experts must be between 1 and {}; got {}", who, kMaxExperts, logits.dim(1));
}

void check_top_k(const char* who, int64_t top_k, int64_t num_experts) {
  MOEBIUS_CHECK(usage, 1 <= top_k && top_k <= num_experts, "{}: top-k must be between 1 and {} experts; got {}", who,
                num_experts, top_k);
}

void check_groups(const RouteRule& rule, int64_t num_experts, int64_t top_k) {
  MOEBIUS_CHECK(usage, rule.num_groups >= 1 && num_experts % rule.num_groups == 0,
                "route_fwd: num_groups must divide {} experts; got {}", num_experts, rule.num_groups);
  MOEBIUS_CHECK(usage, 1 <= rule.topk_groups && rule.topk_groups <= rule.num_groups,
                "route_fwd: topk_groups must be between 1 and {} groups; got {}", rule.num_groups, rule.topk_groups);
  const int64_t width = num_experts / rule.num_groups;
  MOEBIUS_CHECK(usage, rule.num_groups == 1 || (top_k <= rule.topk_groups * width && rule.group_top(top_k) <= width),
                "route_fwd: top-k {} needs more experts than {} groups of {} have; keep more groups", top_k,
                rule.topk_groups, width);
}

void check_route(const char* who, const Route& route, int64_t T, int64_t E, int64_t K) {
  const int64_t R = T * K;
  MOEBIUS_CHECK(usage, R < (int64_t{1} << 31),
                "{}: {} tokens by {} experts are more pairs than 2^31; use smaller micro-batches", who, T, K);
  check_tensor(who, "topk", route.topk_TK, DType::i32, {T, K});
  check_tensor(who, "weight", route.weight_TK, DType::f32, {T, K});
  check_tensor(who, "counts", route.counts_E, DType::i32, {E});
  check_tensor(who, "offsets", route.offsets_E1, DType::i32, {E + 1});
  check_tensor(who, "row_token", route.row_token_R, DType::i32, {R});
  check_tensor(who, "row_pair", route.row_pair_R, DType::i32, {R});
  check_tensor(who, "pair_row", route.pair_row_TK, DType::i32, {T, K});
}

void check(const RouteFwd& a, const Stream& s) {
  constexpr const char* who = "route_fwd";
  check_logits(who, a.logits_TE);
  MOEBIUS_CHECK(usage, a.route.topk_TK.shape.rank() == 2, "{}: topk must be i32 [T, K]; got {}", who,
                to_string(a.route.topk_TK));
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  check_top_k(who, K, E);
  check_route(who, a.route, T, E, K);
  if (!a.bias_E.empty()) check_tensor(who, "bias", a.bias_E, DType::f32, {E});
  if (!a.load_E.empty()) check_tensor(who, "load", a.load_E, DType::i64, {E});
  if (!a.dropped_1.empty()) check_tensor(who, "dropped", a.dropped_1, DType::i64, {1});
  check_groups(a.rule, E, K);
  MOEBIUS_CHECK(usage, a.rule.choice != RouteChoice::sinkhorn || (a.bias_E.empty() && a.rule.num_groups == 1),
                "{}: sinkhorn balances by itself; it takes no bias and no groups", who);
  MOEBIUS_CHECK(usage, a.rule.capacity >= 0, "{}: capacity must not be negative; got {}", who, a.rule.capacity);
  check_scratch(who, a.scratch, RouteFwd::scratch_bytes(T, E, K, a.rule, s));
}

void check_segments(const char* who, const Tensor& segments, const Tensor& sums, int64_t T) {
  if (!segments.empty()) return check_tensor(who, "segment", segments, DType::i32, {T});
  MOEBIUS_CHECK(usage, sums.dim(0) == 1 || T == 0, "{}: without segments there is one; got {}", who, to_string(sums));
}

void check(const RouteBwd& a) {
  constexpr const char* who = "route_bwd";
  check_logits(who, a.logits_TE);
  MOEBIUS_CHECK(usage, a.route.topk_TK.shape.rank() == 2, "{}: topk must be i32 [T, K]; got {}", who,
                to_string(a.route.topk_TK));
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  check_top_k(who, K, E);
  check_tensor(who, "topk", a.route.topk_TK, DType::i32, {T, K});
  check_tensor(who, "pair_row", a.route.pair_row_TK, DType::i32, {T, K});
  check_tensor(who, "dlogits", a.dlogits_TE, DType::f32, a.logits_TE.shape);
  check_tensor(who, "dweight", a.dweight_TK, DType::f32, {T, K});
  if (a.z_coeff != 0) check_tensor(who, "total_tokens", a.total_tokens_1, DType::f64, {1});
  if (a.dsbar_SE.empty()) return;
  check_tensor(who, "dsbar", a.dsbar_SE, DType::f32, {a.dsbar_SE.dim(0), E});
  check_segments(who, a.segment_T, a.dsbar_SE, T);
}

void check(const BalanceStats& a, const Stream& s) {
  constexpr const char* who = "balance_stats";
  check_logits(who, a.logits_TE);
  const int64_t E = a.logits_TE.dim(1);
  check_top_k(who, a.top_k, E);
  check_tensor(who, "prob", a.prob_SE, DType::f32, {a.prob_SE.dim(0), E});
  check_tensor(who, "count", a.count_SE, DType::f32, a.prob_SE.shape);
  check_tensor(who, "z", a.z_1, DType::f64, {1});
  check_tensor(who, "entropy", a.entropy_1, DType::f64, {1});
  check_segments(who, a.segment_T, a.prob_SE, a.logits_TE.dim(0));
  check_scratch(who, a.scratch, BalanceStats::scratch_bytes(a.logits_TE.dim(0), E, a.prob_SE.dim(0), s));
}

void check(const BalanceLoss& a) {
  constexpr const char* who = "balance_loss";
  MOEBIUS_CHECK(usage, a.prob_SE.shape.rank() == 2, "{}: prob must be f32 [S, E]; got {}", who, to_string(a.prob_SE));
  check_tensor(who, "prob", a.prob_SE, DType::f32, a.prob_SE.shape);
  check_tensor(who, "count", a.count_SE, DType::f32, a.prob_SE.shape);
  check_tensor(who, "dsbar", a.dsbar_SE, DType::f32, a.prob_SE.shape);
  check_tensor(who, "loss", a.loss_1, DType::f64, {1});
  check_top_k(who, a.top_k, a.prob_SE.dim(1));
  check_tensor(who, "total_tokens", a.total_tokens_1, DType::f64, {1});
}

void check_gate(const char* who, const Tensor& logits, const Tensor& x, const Tensor& w) {
  check_logits(who, logits);
  MOEBIUS_CHECK(usage, (x.dtype == DType::f32 || x.dtype == DType::bf16) && x.shape.rank() == 2,
                "{}: x must be f32 or bf16 [T, D]; got {}", who, to_string(x));
  check_tensor(who, "x", x, x.dtype, {logits.dim(0), x.dim(1)});
  check_tensor(who, "w", w, w.dtype == x.dtype ? x.dtype : DType::f32, {logits.dim(1), x.dim(1)});
}

void check(const RouterLogitsFwd& a, const Stream& s) {
  constexpr const char* who = "router_logits_fwd";
  check_gate(who, a.logits_TE, a.x_TD, a.w_ED);
  if (!a.bias_E.empty()) check_tensor(who, "bias", a.bias_E, DType::f32, {a.w_ED.dim(0)});
  check_scratch(who, a.scratch, RouterLogitsFwd::scratch_bytes(a, s));
}

void check(const RouterLogitsBwd& a, const Stream& s) {
  constexpr const char* who = "router_logits_bwd";
  check_gate(who, a.dlogits_TE, a.x_TD, a.w_ED);
  if (!a.dx_TD.empty()) check_tensor(who, "dx", a.dx_TD, a.x_TD.dtype, a.x_TD.shape);
  if (!a.dw_ED.empty()) check_tensor(who, "dw", a.dw_ED, DType::f32, a.w_ED.shape);
  if (!a.dbias_E.empty()) check_tensor(who, "dbias", a.dbias_E, DType::f32, {a.w_ED.dim(0)});
  check_tensor(who, "partial", a.partial_PED, DType::f32,
               {RouterLogitsBwd::num_partials(a, s), a.w_ED.dim(0), a.w_ED.dim(1)});
  check_scratch(who, a.scratch, RouterLogitsBwd::scratch_bytes(a, s));
}

double gate_flops(const Tensor& x, const Tensor& w) { return 2.0 * static_cast<double>(x.numel()) * w.dim(0); }

// Returns an addition for each logit if there is a bias.
double bias_flops(const Tensor& bias, const Tensor& logits) {
  return bias.empty() ? 0.0 : static_cast<double>(logits.numel());
}

// Returns the bytes of the sums of blocks of rows, of which the gradient of the bias is the sum.
int64_t bias_sum_bytes(const RouterLogitsBwd& a) {
  return a.dbias_E.empty() ? 0 : SumRows::scratch_bytes({.sum_C = a.dbias_E, .x_TC = a.dlogits_TE});
}

}  // namespace

void route_fwd(Stream& s, const RouteFwd& a) {
  check(a, s);
  OpScope scope(s, "route_fwd", cost(a));
  run_on_device(s, cpu::route_fwd, cuda::route_fwd, a);
}

// About 10 operations for each score, and a comparison for each score and choice.
Cost cost(const RouteFwd& a) {
  const Route& r = a.route;
  const double scores = static_cast<double>(a.logits_TE.numel());
  return {scores * (10.0 + r.topk_TK.dim(1)), bytes_of(a.logits_TE) + bytes_of(r.topk_TK) + bytes_of(r.weight_TK) +
                                                  bytes_of(r.row_token_R) + bytes_of(r.row_pair_R) +
                                                  bytes_of(r.pair_row_TK)};
}

void route_bwd(Stream& s, const RouteBwd& a) {
  check(a);
  OpScope scope(s, "route_bwd", cost(a));
  if (a.dlogits_TE.empty()) return;
  run_on_device(s, cpu::route_bwd, cuda::route_bwd, a);
}

Cost cost(const RouteBwd& a) {
  return {20.0 * static_cast<double>(a.logits_TE.numel()),
          2 * bytes_of(a.logits_TE) + bytes_of(a.dweight_TK) + 2 * bytes_of(a.route.topk_TK)};
}

void balance_stats(Stream& s, const BalanceStats& a) {
  check(a, s);
  const double scores = static_cast<double>(a.logits_TE.numel());
  OpScope scope(s, "balance_stats", {scores * (30.0 + a.top_k), bytes_of(a.logits_TE) + 2 * bytes_of(a.prob_SE)});
  run_on_device(s, cpu::balance_stats, cuda::balance_stats, a);
}

void balance_loss(Stream& s, const BalanceLoss& a) {
  check(a);
  OpScope scope(s, "balance_loss", {5.0 * static_cast<double>(a.prob_SE.numel()), 4 * bytes_of(a.prob_SE)});
  run_on_device(s, cpu::balance_loss, cuda::balance_loss, a);
}

void update_expert_bias(Stream& s, Tensor bias_E, Tensor load_E, float rate) {
  check_tensor("update_expert_bias", "bias", bias_E, DType::f32, {bias_E.numel()});
  check_tensor("update_expert_bias", "load", load_E, DType::i64, bias_E.shape);
  OpScope scope(s, "update_expert_bias",
                {2.0 * static_cast<double>(bias_E.numel()), 2 * bytes_of(bias_E) + 2 * bytes_of(load_E)});
  run_on_device(s, cpu::update_expert_bias, cuda::update_expert_bias, bias_E, load_E, rate);
}

namespace {

void run_router_logits(Stream& s, const RouterLogitsFwd& a, bool few_rows) {
  check(a, s);
  OpScope scope(s, "router_logits_fwd",
                {gate_flops(a.x_TD, a.w_ED) + bias_flops(a.bias_E, a.logits_TE),
                 bytes_of(a.logits_TE) + bytes_of(a.x_TD) + bytes_of(a.w_ED) + bytes_of(a.bias_E)});
  if (a.logits_TE.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::router_logits_fwd(s, a);
    case DeviceKind::cuda:
      return few_rows ? cuda::router_logits_few(s, a) : cuda::router_logits_fwd(s, a);
    case DeviceKind::null:
      return;
  }
}

}  // namespace

void router_logits_fwd(Stream& s, const RouterLogitsFwd& a) { run_router_logits(s, a, /*few_rows=*/false); }
void router_logits_few(Stream& s, const RouterLogitsFwd& a) { run_router_logits(s, a, /*few_rows=*/true); }

void router_logits_bwd(Stream& s, const RouterLogitsBwd& a) {
  check(a, s);
  OpScope scope(
      s, "router_logits_bwd",
      {gate_flops(a.x_TD, a.w_ED) * (!a.dx_TD.empty() + !a.dw_ED.empty()) + bias_flops(a.dbias_E, a.dlogits_TE),
       2 * bytes_of(a.dx_TD) + bytes_of(a.x_TD) + bytes_of(a.dlogits_TE) + bytes_of(a.w_ED) + 2 * bytes_of(a.dw_ED) +
           2 * bytes_of(a.dbias_E)});
  if (a.dlogits_TE.empty()) return;
  run_on_device(s, cpu::router_logits_bwd, cuda::router_logits_bwd, a);
}

// Returns the scratch that the device needs.
int64_t RouteFwd::scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t top_k, const RouteRule& rule,
                                const Stream& s) {
  if (s.target() == DeviceKind::cuda)
    return cuda::RouteScratch(nullptr, num_tokens, num_experts, top_k, rule).num_bytes;
  return cpu::RouteScratch(nullptr, num_tokens, num_experts, top_k, rule).num_bytes;
}

int64_t BalanceStats::scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t num_segments, const Stream& s) {
  if (s.target() != DeviceKind::cuda) return 0;
  return cuda::BalanceScratch(nullptr, num_tokens, num_experts, num_segments).num_bytes;
}

int64_t RouterLogitsFwd::scratch_bytes(const RouterLogitsFwd& a, const Stream& s) {
  return s.target() == DeviceKind::cuda ? cuda::GateScratch(nullptr, a.x_TD, a.w_ED, false).num_bytes : 0;
}

int64_t RouterLogitsBwd::num_partials(const RouterLogitsBwd& a, const Stream& s) {
  const int64_t num_tokens = a.x_TD.dim(0);
  if (s.target() == DeviceKind::cuda && num_tokens > 0)
    return cuda::gate_partials(num_tokens, a.w_ED.dim(0), a.w_ED.dim(1));
  return div_ceil(num_tokens, cpu::kTokensPerPartial);
}

int64_t RouterLogitsBwd::scratch_bytes(const RouterLogitsBwd& a, const Stream& s) {
  const bool on_gpu = s.target() == DeviceKind::cuda;
  return bias_sum_bytes(a) + (on_gpu ? cuda::GateScratch(nullptr, a.x_TD, a.w_ED, true).num_bytes : 0);
}

}  // namespace moebius

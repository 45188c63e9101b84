// route_fwd: every token chooses, then the chosen pairs are counted, dropped over
// capacity, and indexed.
#include <algorithm>

#include "ops/routing/cpu/routing.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cpu {
namespace {

// The balanced scores give the order of the experts of a row; the rest is as with plain scores.
void choose_balanced(const RouteScratch& scratch, int64_t t, int64_t num_experts, int64_t top_k, int32_t* chosen) {
  ScoreRow balanced;
  const float* cost = scratch.cost_TE + t * num_experts;
  for (int64_t i = 0; i < num_experts; ++i) balanced[i] = cost[i] * scratch.column_scale_E[i];
  best_of(balanced.data(), num_experts, top_k, chosen);
}

void choose_scored(const RouteFwd& a, const ScoreRow& s, int64_t num_experts, int64_t top_k, int32_t* chosen) {
  const float* value = s.data();
  ScoreRow biased;
  if (!a.bias_E.empty()) {
    const float* bias = a.bias_E.ptr<float>();
    for (int64_t i = 0; i < num_experts; ++i) biased[i] = s[i] + bias[i];
    value = biased.data();
  }
  if (a.rule.num_groups == 1) return best_of(value, num_experts, top_k, chosen);
  best_of_groups(value, num_experts, top_k, a.rule, chosen);
}

void choose_row(const RouteFwd& a, const RouteScratch& scratch, int64_t t) {
  const int64_t E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const float* logits = a.logits_TE.ptr<float>() + t * E;
  int32_t* chosen = a.route.topk_TK.ptr<int32_t>() + t * K;
  const ScoreFunction score = weight_score(a.rule, K);
  ScoreRow s;
  score_row(score, logits, E, s);
  switch (a.rule.choice) {
    case RouteChoice::scores:
      choose_scored(a, s, E, K, chosen);
      break;
    case RouteChoice::sinkhorn:
      choose_balanced(scratch, t, E, K, chosen);
      break;
    case RouteChoice::forced:
      for (int64_t k = 0; k < K; ++k) chosen[k] = static_cast<int32_t>((t * K + k) % E);
  }
  weigh_row({a.rule, score, logits, s, chosen, K}, a.route.weight_TK.ptr<float>() + t * K);
}

// Chooses for all tokens and counts the choices of each block.
void choose(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const int32_t* topk = a.route.topk_TK.ptr<int32_t>();
  s.pool().run(num_blocks(T), [&](int64_t block, int) {
    const int64_t begin = block * kTokensPerBlock, end = std::min(T, begin + kTokensPerBlock);
    int32_t* count = scratch.start_BE + block * E;
    std::fill_n(count, E, 0);
    for (int64_t t = begin; t < end; ++t) choose_row(a, scratch, t);
    for (int64_t p = begin * K; p < end * K; ++p) ++count[topk[p]];
  });
}

void add_load(const RouteFwd& a) {
  if (a.load_E.empty()) return;
  int64_t* load = a.load_E.ptr<int64_t>();
  const int32_t* count = a.route.counts_E.ptr<int32_t>();
  for (int64_t i = 0; i < a.load_E.numel(); ++i) load[i] += count[i];
}

}  // namespace

RouteScratch::RouteScratch(void* base, int64_t num_tokens, int64_t num_experts, int64_t top_k, const RouteRule& rule) {
  num_bytes = 0;
  const auto place = [&]<class T>(T*& part, int64_t count) {
    part = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + static_cast<uintptr_t>(num_bytes));
    num_bytes += div_ceil(count * static_cast<int64_t>(sizeof(T)), 64) * 64;
  };
  const int64_t blocks = num_blocks(num_tokens);
  const bool sorts = rule.capacity > 0 && rule.drop == RouteDrop::probs;
  const int64_t balanced = rule.choice == RouteChoice::sinkhorn ? 1 : 0;
  place(start_BE, blocks * num_experts);
  place(key_N, sorts ? num_tokens * top_k : 0);
  place(cost_TE, balanced * num_tokens * num_experts);
  place(partial_BE, balanced * blocks * num_experts);
  place(column_scale_E, balanced * num_experts);
}

void route_fwd(Stream& s, const RouteFwd& a) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const RouteScratch scratch(a.scratch.data, T, E, K, a.rule);
  if (a.rule.choice == RouteChoice::sinkhorn) sinkhorn(s, a, scratch);
  choose(s, a, scratch);
  start_experts(a, scratch);
  add_load(a);
  if (a.rule.capacity > 0) {
    std::fill_n(a.route.pair_row_TK.ptr<int32_t>(), T * K, 0);
    drop_over_capacity(s, a, scratch);
    start_experts(a, scratch);
    if (!a.dropped_1.empty()) *a.dropped_1.ptr<int64_t>() += T * K - a.route.offsets_E1.ptr<int32_t>()[E];
  }
  index_rows(s, a, scratch);
}

}  // namespace moebius::cpu

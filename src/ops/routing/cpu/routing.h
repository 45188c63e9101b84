// The parts that the files of the CPU router share. Rows of scores live in fixed arrays of
// kMaxExperts, padded to whole vectors, so that every lane takes the same path: equal logits have
// equal scores, whatever E.
#pragma once

#include <array>
#include <cstdint>

#include "ops/routing/routing.h"

namespace moebius::cpu {

constexpr int64_t kLanes = 16;
constexpr int64_t kTokensPerBlock = 128;     // tokens of one task
constexpr int64_t kTokensPerPartial = 1024;  // tokens of a partial sum of the gate's weight gradient

using ScoreRow = std::array<float, kMaxExperts>;

inline int64_t padded(int64_t num_experts) { return (num_experts + kLanes - 1) / kLanes * kLanes; }
inline int64_t num_blocks(int64_t num_tokens) { return (num_tokens + kTokensPerBlock - 1) / kTokensPerBlock; }

// cpu/scores.cc
struct RowScores {
  float max, sum;  // softmax: of the logits, and of exp(logit - max); sigmoid: sum of the scores
};
// s[0, E) = softmax or sigmoid of the logits; the padding is 0.
RowScores score_row(ScoreFunction score, const float* logits, int64_t num_experts, ScoreRow& s);
// Returns the sum of s[0, n), n a multiple of kLanes: each lane first, then the lanes in a tree.
float lane_sum(const ScoreRow& s, int64_t n);
// Sets best to the positions of the k greatest of value[0, n), the greatest first, and the lower position first among
// equals; NaN counts below every number. n <= kMaxExperts, k <= n.
void best_of(const float* value, int64_t n, int64_t k, int32_t* best);
// Does the same among the experts of the best topk_groups groups.
void best_of_groups(const float* value, int64_t n, int64_t k, const RouteRule& rule, int32_t* best);
// Returns the score that the weights come from. Sinkhorn chooses its own.
ScoreFunction weight_score(const RouteRule& rule, int64_t top_k);
// A token whose weights are computed: its logits, its scores s by the function `score`, and its chosen experts [top_k].
struct RowWeights {
  const RouteRule& rule;
  ScoreFunction score;
  const float* logits;
  const ScoreRow& s;
  const int32_t* chosen;
  int64_t top_k;
};
// Computes weight[k] of the chosen experts, normalised and scaled.
void weigh_row(const RowWeights& row, float* weight);
// Returns a key that orders as floats do, NaN below every number.
int32_t order_of(float x);

// The parts of the scratch of route_fwd. There are B blocks of tokens.
struct RouteScratch {
  RouteScratch(void* base, int64_t num_tokens, int64_t num_experts, int64_t top_k, const RouteRule& rule);
  int32_t* start_BE;      // rows of an expert in a block; then the row at which they start
  uint64_t* key_N;        // drop by probs: the sort keys of an expert's pairs
  float* cost_TE;         // sinkhorn
  float* partial_BE;      // sinkhorn: column sums of a block
  float* column_scale_E;  // sinkhorn: d1
  int64_t num_bytes;
};

// cpu/sinkhorn.cc: cost[t,:] = exp(logits[t,:] - max) and the fixed point d1; cost * d1 orders the
// experts of a row as the balanced matrix d0 cost d1 does.
void sinkhorn(Stream& s, const RouteFwd& a, const RouteScratch& scratch);
// cpu/route_drop.cc: marks dropped pairs (pair_row -1, weight 0) and stores the counts of the kept
// ones in start_BE. REQUIRES: start_BE and route.offsets index all pairs; pair_row is 0 everywhere.
void drop_over_capacity(Stream& s, const RouteFwd& a, const RouteScratch& scratch);
// cpu/route_index.cc: counts and offsets from the counts in start_BE, which become starts; then the
// index of every pair that is not dropped.
void start_experts(const RouteFwd& a, const RouteScratch& scratch);
void index_rows(Stream& s, const RouteFwd& a, const RouteScratch& scratch);

}  // namespace moebius::cpu

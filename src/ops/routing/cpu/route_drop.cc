// Drops the pairs over an expert's capacity. Weights of dropped pairs become 0; the others are not normalised again.
#include <algorithm>

#include "ops/routing/cpu/routing.h"

namespace moebius::cpu {
namespace {

void drop_pair(const Route& route, int64_t pair) {
  route.pair_row_TK.ptr<int32_t>()[pair] = -1;
  route.weight_TK.ptr<float>()[pair] = 0.0f;
}

// Calls fn(expert, pair, row) for the pairs of a block, with the row as if nothing were dropped.
template <class F>
void for_each_pair(const RouteFwd& a, const RouteScratch& scratch, int64_t block, F&& fn) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const int32_t* topk = a.route.topk_TK.ptr<int32_t>();
  int32_t* next = scratch.start_BE + block * E;
  const int64_t begin = block * kTokensPerBlock * K, end = std::min(T, (block + 1) * kTokensPerBlock) * K;
  for (int64_t p = begin; p < end; ++p) fn(topk[p], p, next[topk[p]]++);
}

void drop_late(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int32_t* offsets = a.route.offsets_E1.ptr<int32_t>();
  s.pool().run(num_blocks(a.logits_TE.dim(0)), [&](int64_t block, int) {
    for_each_pair(a, scratch, block, [&](int32_t expert, int64_t pair, int32_t row) {
      if (row - offsets[expert] >= a.rule.capacity) drop_pair(a.route, pair);
    });
  });
}

// Keys ascend with descending weights, then with ascending pairs. A token has an expert at most once, so these are
// ascending tokens.
void drop_light(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int32_t* offsets = a.route.offsets_E1.ptr<int32_t>();
  const float* weight = a.route.weight_TK.ptr<float>();
  s.pool().run(num_blocks(a.logits_TE.dim(0)), [&](int64_t block, int) {
    for_each_pair(a, scratch, block, [&](int32_t, int64_t pair, int32_t row) {
      const uint32_t descending = ~(static_cast<uint32_t>(order_of(weight[pair])) ^ 0x80000000u);
      scratch.key_N[row] = uint64_t{descending} << 32 | static_cast<uint64_t>(pair);
    });
  });
  s.pool().run(a.logits_TE.dim(1), [&](int64_t expert, int) {
    uint64_t* begin = scratch.key_N + offsets[expert];
    uint64_t* end = scratch.key_N + offsets[expert + 1];
    if (end - begin <= a.rule.capacity) return;
    std::nth_element(begin, begin + a.rule.capacity, end);
    for (const uint64_t* key = begin + a.rule.capacity; key < end; ++key) {
      drop_pair(a.route, static_cast<uint32_t>(*key));
    }
  });
}

void count_kept(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const int32_t* topk = a.route.topk_TK.ptr<int32_t>();
  const int32_t* pair_row = a.route.pair_row_TK.ptr<int32_t>();
  s.pool().run(num_blocks(T), [&](int64_t block, int) {
    int32_t* count = scratch.start_BE + block * E;
    std::fill_n(count, E, 0);
    const int64_t begin = block * kTokensPerBlock * K, end = std::min(T, (block + 1) * kTokensPerBlock) * K;
    for (int64_t p = begin; p < end; ++p) count[topk[p]] += pair_row[p] >= 0;
  });
}

}  // namespace

void drop_over_capacity(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  if (a.rule.drop == RouteDrop::position)
    drop_late(s, a, scratch);
  else
    drop_light(s, a, scratch);
  count_kept(s, a, scratch);
}

}  // namespace moebius::cpu

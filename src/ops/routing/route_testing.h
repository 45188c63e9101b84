// The parts that the tests of routing share: a Route that owns its memory, poisoned
// before use, and what every Route must satisfy.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "ops/cpu/testing.h"
#include "ops/routing/routing.h"

namespace moebius::testing {

struct OwnedRoute {
  OwnedRoute(int64_t T, int64_t E, int64_t K)
      : topk(Array::poisoned({T, K}, DType::i32)),
        weight(Array::poisoned({T, K}, DType::f32)),
        counts(Array::poisoned({E}, DType::i32)),
        offsets(Array::poisoned({E + 1}, DType::i32)),
        row_token(Array::poisoned({T * K}, DType::i32)),
        row_pair(Array::poisoned({T * K}, DType::i32)),
        pair_row(Array::poisoned({T, K}, DType::i32)) {}

  Route route() {
    return {.topk_TK = topk.tensor(),
            .weight_TK = weight.tensor(),
            .counts_E = counts.tensor(),
            .offsets_E1 = offsets.tensor(),
            .row_token_R = row_token.tensor(),
            .row_pair_R = row_pair.tensor(),
            .pair_row_TK = pair_row.tensor()};
  }
  std::vector<Array> arrays() const { return {topk, weight, counts, offsets, row_token, row_pair, pair_row}; }

  Array topk, weight, counts, offsets, row_token, row_pair, pair_row;
};

struct Routing {
  Routing(int64_t T, int64_t E, int64_t K)
      : T(T), E(E), K(K), plan(T, E, K), load({E}, DType::i64), dropped({1}, DType::i64) {}

  void run(Stream& s, Array logits, Array bias, const RouteRule& rule) {
    Array scratch = Array::poisoned({RouteFwd::scratch_bytes(T, E, K, rule, s)}, DType::u8);
    route_fwd(s, {.route = plan.route(),
                  .load_E = load.tensor(),
                  .dropped_1 = dropped.tensor(),
                  .scratch = scratch.tensor(),
                  .logits_TE = logits.tensor(),
                  .bias_E = bias.tensor(),
                  .rule = rule});
    scratch.bytes();  // waits for the device
  }
  int64_t num_dropped() const { return static_cast<int64_t>(dropped.values()[0]); }

  int64_t T, E, K;
  OwnedRoute plan;
  Array load, dropped;
};

// Counts, offsets and the two maps agree; rows are sorted by expert, then token; dropped
// pairs weigh nothing.
inline void expect_consistent(const Routing& r) {
  const Values topk = r.plan.topk.values(), weight = r.plan.weight.values(), counts = r.plan.counts.values();
  const Values offsets = r.plan.offsets.values(), token = r.plan.row_token.values(), pair = r.plan.row_pair.values();
  const Values row = r.plan.pair_row.values();
  ASSERT_EQ(offsets[0], 0);
  Values chosen(r.E, 0);
  for (int64_t p = 0; p < r.T * r.K; ++p) {
    ASSERT_TRUE(0 <= topk[p] && topk[p] < r.E);
    ++chosen[static_cast<int64_t>(topk[p])];
    for (int64_t q = p / r.K * r.K; q < p; ++q) ASSERT_NE(topk[p], topk[q]) << "a token meets an expert once";
    if (row[p] < 0) {
      ASSERT_EQ(row[p], -1);
      ASSERT_EQ(weight[p], 0);
    } else {
      ASSERT_EQ(pair[static_cast<int64_t>(row[p])], p);
    }
  }
  ASSERT_EQ(chosen, r.load.values());
  for (int64_t e = 0; e < r.E; ++e) {
    ASSERT_EQ(offsets[e + 1] - offsets[e], counts[e]);
    for (auto i = static_cast<int64_t>(offsets[e]); i < offsets[e + 1]; ++i) {
      const auto p = static_cast<int64_t>(pair[i]);
      ASSERT_EQ(row[p], i);
      ASSERT_EQ(topk[p], e);
      ASSERT_EQ(token[i], p / r.K);
      const bool first = i == static_cast<int64_t>(offsets[e]);
      ASSERT_TRUE(first || token[i - 1] < token[i]);
    }
  }
  ASSERT_EQ(r.num_dropped(), r.T * r.K - static_cast<int64_t>(offsets[r.E]));
  // Rows that do not exist are not written.
  for (auto i = static_cast<int64_t>(offsets[r.E]); i < r.T * r.K; ++i) ASSERT_EQ(pair[i], -1);
}

}  // namespace moebius::testing

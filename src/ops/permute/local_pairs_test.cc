#include "ops/permute/local_pairs.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t N = 5, K = 2, first = 2, e = 3, E = 8;
  bool drops = true;
};

int64_t expert_of(const Case& c, int64_t n, int64_t k) { return (n * 5 + k * 3) % c.E; }
bool is_here(const Case& c, int64_t n, int64_t k) {
  const int64_t expert = expert_of(c, n, k);
  return expert >= c.first && expert < c.first + c.e && !(c.drops && (n + 2 * k) % 5 == 1);
}

TEST(LocalPairs, KeepThePairsOfSomeExpertsInTheirOrder) {
  testing::on_each_device([](Stream& s) {
    for (const Case& c : {Case{}, Case{.N = 0}, Case{.N = 700, .K = 5, .e = 4, .E = 11}, Case{.N = 33, .drops = false},
                          Case{.N = 40, .K = 7, .first = 0, .e = 1, .E = 10}}) {
      const int64_t L = std::min(c.K, c.e);
      std::vector<int32_t> topk, kept, rows;
      Values want_topk, want_k, want_weight, want_rows, want_all;
      Array weight = Array::normal({c.N, c.K}, DType::f32, 3), from = Array::normal({c.N * L}, DType::f32, 4);
      const Values weights = weight.values(), froms = from.values();
      for (int64_t n = 0; n < c.N; ++n) {
        for (int64_t k = 0; k < c.K; ++k) {
          topk.push_back(static_cast<int32_t>(expert_of(c, n, k)));
          kept.push_back(c.drops && (n + 2 * k) % 5 == 1 ? -1 : 7);
          want_all.push_back(0);
          if (!is_here(c, n, k)) continue;
          want_topk.push_back(topk.back());
          want_k.push_back(static_cast<double>(k));
          want_weight.push_back(weights[n * c.K + k]);
          rows.push_back(static_cast<int32_t>(c.N * L - 1 - std::ssize(want_rows)));  // backwards
          want_rows.push_back(want_weight.back());
          want_all.back() = froms[rows.back()];
        }
        ASSERT_LE(std::ssize(want_topk), (n + 1) * L);
        want_topk.resize((n + 1) * L, -1);
        want_k.resize((n + 1) * L, -1);
        want_weight.resize((n + 1) * L, 0);
        rows.resize((n + 1) * L, -1);
      }
      Array all = Array::of_ints({c.N, c.K}, topk), is_kept = Array::of_ints({c.N, c.K}, kept);
      Array got_topk = Array::poisoned({c.N, L}, DType::i32), got_k = got_topk,
            got_weight = Array::poisoned({c.N, L}, DType::f32);
      local_pairs(s, {.topk_NL = got_topk.tensor(),
                      .k_NL = got_k.tensor(),
                      .weight_NL = got_weight.tensor(),
                      .topk_NK = all.tensor(),
                      .kept_NK = c.drops ? is_kept.tensor() : Tensor{},
                      .weight_NK = weight.tensor(),
                      .first_expert = c.first,
                      .num_experts = c.e});
      EXPECT_EQ(got_topk.values(), want_topk);
      EXPECT_EQ(got_k.values(), want_k);
      EXPECT_EQ(got_weight.values(), want_weight);

      Array pair_row = Array::of_ints({c.N, L}, rows), to = Array::poisoned({c.N * L}, DType::f32),
            back = Array::poisoned({c.N, c.K}, DType::f32);
      local_pairs_to_rows(s, {.to_R = to.tensor(), .from_NL = got_weight.tensor(), .pair_row_NL = pair_row.tensor()});
      const Values row_weights = to.values();
      for (int64_t r = 0; r < c.N * L; ++r) {
        const int64_t i = c.N * L - 1 - r;  // the rows were given out backwards
        if (i < std::ssize(want_rows))
          EXPECT_EQ(row_weights[r], want_rows[i]);
        else
          EXPECT_TRUE(std::isnan(row_weights[r])) << "a row without a pair was written";
      }
      rows_to_all_pairs(
          s,
          {.to_NK = back.tensor(), .from_R = from.tensor(), .pair_row_NL = pair_row.tensor(), .k_NL = got_k.tensor()});
      EXPECT_EQ(back.values(), want_all);
    }
  });
}

TEST(LocalPairs, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array ints({2, 3}, DType::i32), f({2, 3}, DType::f32);
  EXPECT_EQ(testing::error_of(
                [&] { local_pairs(s, {.topk_NL = ints.tensor(), .topk_NK = ints.tensor(), .weight_NK = f.tensor()}); }),
            "local_pairs: topk must be i32[2, 1]; got i32[2, 3]");
  EXPECT_EQ(testing::error_of([&] {
              local_pairs_to_rows(s, {.to_R = f.tensor(), .from_NL = f.tensor(), .pair_row_NL = ints.tensor()});
            }),
            "local_pairs_to_rows: to must be f32[6]; got f32[2, 3]");
  EXPECT_EQ(testing::error_of([&] {
              rows_to_all_pairs(s, {.to_NK = f.tensor(),
                                    .from_R = f.tensor().view({6}),
                                    .pair_row_NL = ints.tensor(),
                                    .k_NL = ints.tensor().rows(0, 1)});
            }),
            "rows_to_all_pairs: k must be i32[2, 3]; got i32[1, 3]");
}

}  // namespace
}  // namespace moebius

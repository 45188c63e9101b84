#include "ops/permute/index_rows.h"

#include <algorithm>
#include <array>
#include <bit>

#include "ops/cpu/testing.h"
#include "ops/permute/index_rows_ref.h"
#include "ops/permute/permute.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

std::vector<int64_t> ints(const Array& a, int64_t count) {
  const Values v = a.values();
  return {v.begin(), v.begin() + count};
}
std::vector<int32_t> narrowed(const std::vector<int64_t>& x) { return {x.begin(), x.end()}; }

struct Case {
  int64_t T, K, E, first, e;
  bool drops, skewed;
};

// K different experts of each token; skewed: nearly all the same ones.
std::vector<int64_t> choices(const Case& c) {
  std::vector<int64_t> topk;
  const Rng rng(3, RngSite::bench);
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t start = c.skewed && t % 7 != 3 ? c.first : static_cast<int64_t>(rng.below(t, c.E));
    for (int64_t k = 0; k < c.K; ++k) topk.push_back((start + k) % c.E);
  }
  return topk;
}

class IndexRowsTest : public testing::DeviceTest<Case> {};

TEST_P(IndexRowsTest, EqualsTheDefinition) {
  const Case& c = this->c();
  const std::vector<int64_t> topk = choices(c);
  std::vector<int64_t> kept;
  for (int64_t p = 0; p < c.T * c.K && c.drops; ++p) kept.push_back(p % 5 == 2 ? -1 : p);
  const ref::RowIndex want = ref::index_rows(topk, kept, c.K, c.first, c.e);
  const int64_t R = c.T * std::min(c.K, c.e), num_rows = std::ssize(want.token);
  Array topk_TK = Array::of_ints({c.T, c.K}, narrowed(topk)), counts({c.e}, DType::i32), offsets({c.e + 1}, DType::i32);
  Array token = Array::poisoned({R}, DType::i32), pair = Array::poisoned({R}, DType::i32);
  // kept may be the memory of pair_row.
  Array row = c.drops ? Array::of_ints({c.T, c.K}, narrowed(kept)) : Array::poisoned({c.T, c.K}, DType::i32);
  Array scratch({IndexRows::scratch_bytes(c.T, c.e, s_)}, DType::u8);
  index_rows(s_, {.counts_e = counts.tensor(),
                  .offsets_e1 = offsets.tensor(),
                  .row_token_R = token.tensor(),
                  .row_pair_R = pair.tensor(),
                  .pair_row_TK = row.tensor(),
                  .scratch = scratch.tensor(),
                  .topk_TK = topk_TK.tensor(),
                  .kept_TK = c.drops ? row.tensor() : Tensor{},
                  .first_expert = c.first});
  EXPECT_EQ(ints(offsets, c.e + 1), want.offsets);
  EXPECT_EQ(ints(token, num_rows), want.token);
  EXPECT_EQ(ints(pair, num_rows), want.pair);
  EXPECT_EQ(ints(row, c.T * c.K), want.row_of_pair);
  for (int64_t i = 0; i < c.e; ++i) EXPECT_EQ(ints(counts, c.e)[i], want.offsets[i + 1] - want.offsets[i]);
  for (int64_t r = num_rows; r < R; ++r) EXPECT_EQ(token.values()[r], -1) << "a row that does not exist was written";
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [T, K, E, first, e] :
       std::vector<std::array<int64_t, 5>>{{0, 2, 4, 0, 4},
                                           {1, 1, 1, 0, 1},
                                           {7, 2, 6, 2, 3},
                                           {130, 3, 8, 4, 4},
                                           {300, 4, 9, 8, 1},
                                           {257, 8, 64, 0, 64},
                                           {33100, 2, 64, 0, 64},  // blocks of a GPU go over several chunks
                                           {70, 2, 1024, 0, 1024}}) {
    for (const bool drops : {false, true}) {
      for (const bool skewed : {false, true}) all.push_back({T, K, E, first, e, drops, skewed});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, IndexRowsTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// Tokens in sections, of each of which only the first ones arrived. The routes of the others have random bits.
TEST(IndexRoutes, IsTheIndexOfTheTokensThatArrived) {
  testing::on_each_device([](Stream& s) {
    for (const auto& [G, n, L, first, e] : std::vector<std::array<int64_t, 5>>{
             {1, 0, 2, 0, 2}, {1, 70, 1, 3, 1}, {3, 150, 3, 4, 5}, {2, 601, 8, 0, 32}, {4, 33, 34, 7, 40}}) {
      const int64_t N = G * n, V = 3, R = N * std::min(L, e);
      const Rng rng(11, RngSite::bench);
      std::vector<int32_t> routes, arrive;
      std::vector<int64_t> topk;
      Values weights;
      for (int64_t g = 0; g < G; ++g) arrive.insert(arrive.end(), {0, 1 << 30, static_cast<int32_t>(n - g * n / 3)});
      for (int64_t t = 0; t < N; ++t) {
        const bool arrived = t % n < arrive[t / n * V + V - 1];
        const int64_t start = static_cast<int64_t>(rng.below(t, e)), pairs = t % (L + 1);
        for (int64_t l = 0; l < L; ++l) {
          routes.push_back(l < pairs || !arrived ? static_cast<int32_t>(first + (start + l) % e) : -1);
          topk.push_back(arrived ? routes.back() : -1);
        }
        for (int64_t l = 0; l < L; ++l) {
          const float weight = l < pairs || !arrived ? 0.25f * static_cast<float>(l + t % 9) : 0.0f;
          routes.push_back(std::bit_cast<int32_t>(weight));
          weights.push_back(arrived ? weight : 0.0);
        }
      }
      const ref::RowIndex want = ref::index_rows(topk, {}, L, first, e);
      Array routes_N2L = Array::of_ints({N, 2 * L}, routes), arrive_GV = Array::of_ints({G, V}, arrive);
      Array offsets({e + 1}, DType::i32), token = Array::poisoned({R}, DType::i32);
      Array row = Array::poisoned({N, L}, DType::i32), weight = Array::poisoned({N, L}, DType::f32);
      Array scratch({IndexRows::scratch_bytes(N, e, s)}, DType::u8);
      index_routes(s, {.offsets_e1 = offsets.tensor(),
                       .row_token_R = token.tensor(),
                       .pair_row_NL = row.tensor(),
                       .weight_NL = weight.tensor(),
                       .scratch = scratch.tensor(),
                       .routes_N2L = routes_N2L.tensor(),
                       .arrive_GV = arrive_GV.tensor(),
                       .first_expert = first});
      synchronize(s);
      EXPECT_EQ(ints(offsets, e + 1), want.offsets);
      EXPECT_EQ(ints(token, std::ssize(want.token)), want.token);
      EXPECT_EQ(ints(row, N * L), want.row_of_pair);
      EXPECT_EQ(weight.values(), weights);
      for (int64_t r = std::ssize(want.token); r < R; ++r) EXPECT_EQ(token.values()[r], -1) << "no such row";
    }
  });
}

TEST(IndexArrivals, EqualsTheDefinition) {
  testing::on_each_device([](Stream& s) {
    for (const auto& [W, E, first, e] :
         std::vector<std::array<int64_t, 4>>{{1, 1, 0, 1}, {2, 4, 2, 2}, {3, 8, 0, 8}, {8, 6, 3, 1}, {5, 70, 7, 33}}) {
      std::vector<std::vector<int64_t>> here(W, std::vector<int64_t>(e));
      std::vector<int64_t> all(W * E);
      const Rng rng(5, RngSite::bench);
      for (int64_t i = 0; i < W * E; ++i) {
        all[i] = i % 3 == 1 ? 0 : static_cast<int64_t>(rng.below(i, i % 4 == 0 ? 300 : 4));
        const int64_t expert = i % E - first;
        if (expert >= 0 && expert < e) here[i / E][expert] = all[i];
      }
      const ref::RowIndex want = ref::index_arrivals(here);
      const int64_t num_rows = std::ssize(want.token), R = num_rows + 5;
      Array offsets({e + 1}, DType::i32), counts = Array::of_ints({W, E}, narrowed(all));
      Array arrival = Array::poisoned({R}, DType::i32), row = Array::poisoned({R}, DType::i32);
      index_arrivals(s, {.offsets_e1 = offsets.tensor(),
                         .arrival_R = arrival.tensor(),
                         .row_R = row.tensor(),
                         .counts_WE = counts.tensor(),
                         .first_expert = first});
      EXPECT_EQ(ints(offsets, e + 1), want.offsets);
      EXPECT_EQ(ints(arrival, num_rows), want.token);
      EXPECT_EQ(ints(row, num_rows), want.row_of_pair);
    }
  });
}

TEST(GatherRows, WritesOnlyRowsBelowTheLastOffset) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::i32}) {
      for (const int64_t D : {1, 3, 8, 64}) {
        const int64_t R = 150, num_rows = 139, N = 40;
        std::vector<int32_t> row(R, 1 << 30);  // what no row may read
        for (int64_t r = 0; r < num_rows; ++r) row[r] = static_cast<int32_t>(r * 17 % N);
        Array from =
            dtype == DType::i32 ? Array::of(Shape{N, D}, dtype, Values(N * D, 7)) : Array::normal({N, D}, dtype, 1);
        Array to = Array::poisoned({R, D}, dtype), index = Array::of_ints({R}, row);
        Array offsets = Array::of_ints({3}, {0, 50, static_cast<int32_t>(num_rows)});
        const std::vector<unsigned char> before = to.bytes();
        gather_rows(
            s,
            {.to_RD = to.tensor(), .from_ND = from.tensor(), .row_R = index.tensor(), .offsets_E1 = offsets.tensor()});
        const auto got = to.bytes(), source = from.bytes();
        const int64_t row_bytes = D * size_of(dtype);
        for (int64_t r = 0; r < R; ++r) {
          const auto* want = r < num_rows ? &source[row[r] * row_bytes] : &before[r * row_bytes];
          EXPECT_TRUE(std::equal(want, want + row_bytes, &got[r * row_bytes])) << "row " << r;
        }
      }
    }
  });
}

TEST(IndexRows, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array topk({6, 2}, DType::i32), offsets({3}, DType::i32), rows({12}, DType::i32), f({6, 2}, DType::f32);
  Array scratch({64}, DType::u8);
  const IndexRows good{.offsets_e1 = offsets.tensor(),
                       .row_token_R = rows.tensor(),
                       .row_pair_R = rows.tensor(),
                       .pair_row_TK = topk.tensor(),
                       .scratch = scratch.tensor(),
                       .topk_TK = topk.tensor()};
  const auto error = [&](const IndexRows& a) { return testing::error_of([&] { index_rows(s, a); }); };
  IndexRows bad = good;
  bad.offsets_e1 = {};
  EXPECT_EQ(error(bad), "index_rows: offsets must be i32 [e + 1]; got f32[0]");
  bad = good;
  bad.topk_TK = f.tensor();
  EXPECT_EQ(error(bad), "index_rows: topk must be i32[6, 2]; got f32[6, 2]");
  bad = good;
  bad.row_token_R = rows.tensor().rows(0, 11);
  EXPECT_EQ(error(bad), "index_rows: row_token must have at least 12 rows; got i32[11]");
  bad = good;
  bad.scratch = {};
  EXPECT_EQ(error(bad), "index_rows: scratch must have 8 bytes; got 0");
  Array many({1026}, DType::i32);
  bad = good;
  bad.offsets_e1 = many.tensor();
  EXPECT_EQ(error(bad), "index_rows: at most 1024 experts; got 1025");
  EXPECT_EQ(testing::error_of([&] {
              index_arrivals(s, {.offsets_e1 = offsets.tensor(), .counts_WE = topk.tensor(), .first_expert = 1});
            }),
            "index_arrivals: counts must be i32 [W, E] with the experts 1 to 3 in E; got i32[6, 2]");
  EXPECT_EQ(testing::error_of([&] {
              index_routes(s, {.offsets_e1 = offsets.tensor(),
                               .row_token_R = rows.tensor(),
                               .pair_row_NL = topk.tensor(),
                               .weight_NL = f.tensor(),
                               .routes_N2L = rows.tensor().view({6, 2}),
                               .arrive_GV = topk.tensor()});
            }),
            "index_routes: routes must be i32[6, 4]; got i32[6, 2]");
  Array routes({6, 4}, DType::i32);
  EXPECT_EQ(testing::error_of([&] {
              index_routes(s, {.offsets_e1 = offsets.tensor(),
                               .row_token_R = rows.tensor(),
                               .pair_row_NL = topk.tensor(),
                               .weight_NL = f.tensor(),
                               .routes_N2L = routes.tensor(),
                               .arrive_GV = routes.tensor().view({4, 6})});
            }),
            "index_routes: arrive must be i32 [G, V] where G divides the 6 tokens; got i32[4, 6]");
  EXPECT_EQ(testing::error_of([&] { gather_rows(s, {.to_RD = f.tensor(), .from_ND = rows.tensor()}); }),
            "gather_rows: to must be [R, D] and from [N, D]; got f32[6, 2] and i32[12]");
}

TEST(IndexRows, NullDeviceCounts) {
  const auto null = [](Shape shape) { return testing::null_tensor(shape, DType::i32); };
  const Cost cost = testing::cost_on_null([&](Stream& s) {
    gather_rows(s, {.to_RD = null({6, 5}), .from_ND = null({3, 5}), .row_R = null({6}), .offsets_E1 = null({3})});
    index_arrivals(s, {.offsets_e1 = null({3}), .arrival_R = null({6}), .row_R = null({6}), .counts_WE = null({2, 4})});
  });
  EXPECT_EQ(cost.bytes, 4 * (2 * 6 * 5 + 6) + 4 * (2 * 6 + 2 * 4));
}

}  // namespace
}  // namespace moebius

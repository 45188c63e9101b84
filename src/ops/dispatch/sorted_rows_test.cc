// Rows of tokens in a local array that is sorted by destination, and routes as such rows.
#include <algorithm>
#include <bit>

#include "io/testing.h"
#include "ops/cpu/testing.h"
#include "ops/dispatch/dispatch.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t P = 2, T = 5, e = 2, K = 2, D = 8, last = 0, G = 1;
  bool has_sections = false;  // of T rows for each destination
  DType dtype = DType::f32;
  int64_t E() const { return P * e; }
  int64_t J() const { return std::min(K, P); }
  int64_t S() const { return T * (has_sections ? P : J()); }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (Case c :
       {Case{}, Case{.T = 0}, Case{.P = 1, .K = 1}, Case{.P = 4, .T = 33, .K = 3, .D = 5, .last = 2, .G = 2},
        Case{.P = 2, .T = 70, .K = 4, .D = 2056, .last = 1}, Case{.P = 12, .T = 41, .K = 5, .D = 1, .last = 11},
        Case{.P = 40, .T = 300, .e = 1, .K = 34, .D = 24, .last = 7, .G = 5}}) {
    for (const bool has_sections : {false, true}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        c.has_sections = has_sections;
        c.dtype = dtype;
        all.push_back(c);
      }
    }
  }
  return all;
}

// Tokens choose consecutive experts; some pairs are dropped.
int64_t expert_of(const Case& c, int64_t t, int64_t k) {
  return (static_cast<int64_t>(Rng(7, RngSite::bench).below(static_cast<uint64_t>(t), c.E())) + k) % c.E();
}
bool is_kept(int64_t t, int64_t k) { return (3 * t + 5 * k) % 7 != 2; }

class SortedRowsTest : public testing::DeviceTest<Case> {
 protected:
  // The tokens that go to p, in their order.
  std::vector<int64_t> tokens_of(int64_t p) const {
    std::vector<int64_t> tokens;
    for (int64_t t = 0; t < c().T; ++t) {
      bool goes = false;
      for (int64_t k = 0; k < c().K; ++k) goes |= is_kept(t, k) && expert_of(c(), t, k) / c().e == p;
      if (goes) tokens.push_back(t);
    }
    return tokens;
  }
  std::vector<int64_t> order() const {
    std::vector<int64_t> all;
    for (int64_t p = 0; p < c().P; ++p)
      if (p != c().last) all.push_back(p);
    all.push_back(c().last);
    return all;
  }
};

TEST_P(SortedRowsTest, AreWhereTheReferencePutsThem) {
  const auto [P, T, e, K, D, last, G, has_sections, dtype] = c();
  const int64_t J = c().J(), S = c().S();
  std::vector<int32_t> experts, kept;
  for (int64_t p = 0; p < T * K; ++p) {
    experts.push_back(static_cast<int32_t>(expert_of(c(), p / K, p % K)));
    kept.push_back(is_kept(p / K, p % K) ? 0 : -1);
  }
  Array topk = Array::of_ints({T, K}, experts), keeps = Array::of_ints({T, K}, kept);
  Array dest = Array::poisoned({T, J}, DType::i32), slot = dest, count = Array::poisoned({P}, DType::i32);
  Array row = Array::poisoned({G, T, J}, DType::i32), x = Array::normal({T, D}, dtype, 1);
  Array array = Array::of({S, D}, dtype, Values(S * D, 7.0));
  Array scratch({Destinations::scratch_bytes(T, P, s_)}, DType::u8);
  destinations(s_, {.dest_TJ = dest.tensor(),
                    .slot_TJ = slot.tensor(),
                    .count_P = count.tensor(),
                    .scratch = scratch.tensor(),
                    .topk_TK = topk.tensor(),
                    .kept_TK = keeps.tensor(),
                    .experts_of_rank = e});
  sorted_places(s_, {.row_GTJ = row.tensor(),
                     .dest_TJ = dest.tensor(),
                     .slot_TJ = slot.tensor(),
                     .count_P = count.tensor(),
                     .last = last,
                     .section = has_sections ? T : 0});
  for (int64_t g = 0; g < G; ++g)
    spread_rows(s_, {.array_SD = array.tensor(),
                     .x_TD = x.tensor(),
                     .row_TJ = row.tensor().view({G * T, J}).rows(g * T, (g + 1) * T)});

  const Values from = x.values(), dests = dest.values();
  Values want(S * D, 7.0), want_row(G * T * J, -1);
  int64_t first = 0;
  for (const int64_t p : order()) {
    const std::vector<int64_t> tokens = tokens_of(p);
    for (int64_t i = 0; i < std::ssize(tokens); ++i) {
      const int64_t t = tokens[i], j = std::find(&dests[t * J], &dests[t * J] + J, p) - &dests[t * J];
      want_row[(p / (P / G) * T + t) * J + j] = static_cast<double>(first + i);
      std::copy_n(&from[t * D], D, &want[(first + i) * D]);
    }
    first += has_sections ? T : std::ssize(tokens);
  }
  EXPECT_EQ(row.values(), want_row);
  EXPECT_EQ(array.values(), want);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SortedRowsTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// A row of zeros is then a token without experts.
TEST(SortedRows, PackedRoutesMayNumberExpertsFromOne) {
  testing::on_each_device([](Stream& s) {
    Array topk = Array::of_ints({2, 2}, {3, 0, 5, 1}), kept = Array::of_ints({2, 2}, {0, 1, -1, 0});
    Array weight = Array::of({2, 2}, DType::f32, {0, 0, 0, 0}), routes = Array::poisoned({2, 4}, DType::i32);
    pack_routes(s, {.routes_T2K = routes.tensor(),
                    .topk_TK = topk.tensor(),
                    .kept_TK = kept.tensor(),
                    .weight_TK = weight.tensor(),
                    .shift = 1});
    EXPECT_EQ(routes.values(), (Values{4, 1, 0, 0, -1, 2, 0, 0}));
  });
}

TEST(SelectRoutes, LeavesThePairsOfSomeExperts) {
  testing::on_each_device([](Stream& s) {
    Values packed{0, 5, 0, 0, 4, -1, 0, 0, 8, 7, 0, 0};
    const Values weights{0.5, -1, 2, 3, 4, 5};
    for (size_t i = 0; i < weights.size(); ++i)
      packed[i / 2 * 4 + 2 + i % 2] = std::bit_cast<int32_t>(static_cast<float>(weights[i]));
    Array routes = Array::of({3, 4}, DType::i32, packed);
    Array topk = Array::poisoned({3, 2}, DType::i32), weight = Array::poisoned({3, 2}, DType::f32);
    const SelectRoutes select{.topk_NK = topk.tensor(),
                              .weight_NK = weight.tensor(),
                              .routes_N2K = routes.tensor(),
                              .first_expert = 4,
                              .num_experts = 4};
    select_routes(s, select);
    EXPECT_EQ(topk.values(), (Values{-1, 1, 0, -1, -1, 3}));
    EXPECT_EQ(weight.values(), weights);
    SelectRoutes bad = select;
    bad.routes_N2K = topk.tensor();
    expect_error(ErrorKind::usage, "select_routes: routes must be", [&] { select_routes(s, bad); });
  });
}

TEST(SortedRows, MessagesOfTheChecks) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array ints = Array::of_ints({2, 2}, {0, 1, 0, 1});
  const Tensor t = ints.tensor();
  expect_error(ErrorKind::usage, "sorted_places: row must be [G, T, J] where G divides the 2 destinations",
               [&] { sorted_places(s, {.row_GTJ = t, .dest_TJ = t, .count_P = t.view({4}).rows(0, 2)}); });
  expect_error(ErrorKind::usage, "spread_rows: row must be i32[2, 1]; got i32[4, 1]", [&] {
    spread_rows(s, {.array_SD = t, .x_TD = t, .row_TJ = t.view({4, 1})});
  });
}

}  // namespace
}  // namespace moebius

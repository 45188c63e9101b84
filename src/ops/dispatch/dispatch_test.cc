// All ranks of a case run one after another on one stream. So a call that all ranks have made separates their writes
// from later reads, as a round does.
#include "ops/dispatch/dispatch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "device/block_limit.h"
#include "io/testing.h"
#include "ops/cpu/testing.h"
#include "ops/dispatch/dispatch_ref.h"
#include "ops/dispatch/dispatch_testing.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/index_rows_ref.h"

namespace moebius {
namespace {

using ref::Arrival;
using testing::Array;
using testing::Values;

using testing::dispatch::Case;
using testing::dispatch::cases;
using testing::dispatch::expert_of;
using testing::dispatch::is_kept;
using testing::dispatch::Rank;

class DispatchTest : public testing::DeviceTest<Case> {
 protected:
  // Runs all ranks until each has the places of its rows.
  void announce() {
    if (c().blocks > 0 && s_.device() == DeviceKind::cuda) few_.emplace(s_, c().blocks);
    for (int64_t q = 0; q < c().W(); ++q) ranks_.push_back(std::make_unique<Rank>(c(), q));
    Values addresses;
    bases_ = Array({c().W()}, DType::i64);
    for (int64_t q = 0; q < c().W(); ++q)
      bases_.tensor().ptr<int64_t>()[q] = reinterpret_cast<int64_t>(ranks_[q]->window.tensor().data);
    for (int64_t q = 0; q < c().W(); ++q) {
      Rank& r = *ranks_[q];
      Array scratch({Destinations::scratch_bytes(c().T, c().P, s_)}, DType::u8);
      experts_.push_back(r.experts_of_token);
      destinations(s_, {.dest_TJ = r.dest.tensor(),
                        .slot_TJ = r.slot.tensor(),
                        .count_P = r.count.tensor(),
                        .scratch = scratch.tensor(),
                        .topk_TK = r.topk.tensor(),
                        .kept_TK = r.kept.tensor(),
                        .experts_of_rank = c().e});
      push_to_all(s_, {.sent_1 = r.sent.tensor(),
                       .x_M = r.count.tensor(),
                       .bases_W = bases_.tensor(),
                       .offset = r.offset[Rank::counts],
                       .rank = q});
      synchronize(s_);  // the scratch of this scope is in use until then
    }
    for (int64_t q = 0; q < c().W(); ++q) {
      Rank& r = *ranks_[q];
      dispatch_places(s_, {.row_TJ = r.row.tensor(),
                           .back_row_TB = r.back_row.tensor(),
                           .arrive_W1 = r.arrive.tensor(),
                           .back_W = r.back_first.tensor(),
                           .dest_TJ = r.dest.tensor(),
                           .slot_TJ = r.slot.tensor(),
                           .counts_WP = r.at(Rank::counts),
                           .rank = q});
    }
    for (int64_t q = 0; q < c().W(); ++q) {
      EXPECT_EQ(ranks_[q]->sent.values()[0], static_cast<double>((c().W() - 1) * c().P * 4)) << "the counts";
      arrivals_.push_back(ref::arrivals(experts_, q, c().etp, c().e));
      returns_.push_back(ref::returns(experts_, q, c().etp, c().e));
      for (const Arrival& row : arrivals_[q]) left_[row.from] += row.from == q ? 0 : 1;
      for (const Arrival& row : returns_[q]) returned_[row.from] += row.from == q ? 0 : 1;
    }
  }
  void push(int64_t q, int array, Tensor x) {
    for (const RowDistances& of : c().parts()) push_part(q, array, x, of);
  }
  void push_part(int64_t q, int array, Tensor x, const RowDistances& of) {
    Rank& r = *ranks_[q];
    push_rows(s_, {.sent_1 = r.sent.tensor(),
                   .x_TD = x,
                   .dest_TJ = r.dest.tensor(),
                   .row_TJ = r.row.tensor(),
                   .bases_W = bases_.tensor(),
                   .offset = r.offset[array],
                   .rank = q,
                   .etp = c().etp,
                   .of = of});
  }
  // Pushes the rows of all ranks, and compares all rows that arrived.
  void expect_rows_in_order() {
    announce();
    const double row_bytes = static_cast<double>(c().D * size_of(c().dtype));
    for (int64_t q = 0; q < c().W(); ++q) sent_now(q);
    for (int64_t q = 0; q < c().W(); ++q) push(q, Rank::tokens, ranks_[q]->x.tensor());
    for (int64_t q = 0; q < c().W(); ++q) {
      const Tensor tokens = ranks_[q]->at(Rank::tokens);
      const auto num = std::ssize(arrivals_[q]);
      ASSERT_EQ(ranks_[q]->arrive.values().back(), static_cast<double>(num));
      for (int64_t i = 0; i < c().N(); ++i) {
        if (i < num)
          ASSERT_EQ(row_of(tokens, i), row_of(ranks_[arrivals_[q][i].from]->x.tensor(), arrivals_[q][i].token));
        else
          ASSERT_TRUE(is_poison(tokens, i)) << "a row that no token has was written";
      }
      EXPECT_EQ(sent_now(q), left_[q] * row_bytes);
    }
  }
  // Returns the k of the pairs of a token of another rank that are at rank q.
  std::vector<int64_t> pairs_at(const Arrival& row, int64_t q) {
    std::vector<int64_t> pairs;
    for (int64_t k = 0; k < c().K; ++k)
      if (is_kept(row.from, row.token, k) && expert_of(c(), row.from, row.token, k) / c().e == q / c().etp)
        pairs.push_back(k);
    return pairs;
  }
  // back: the values of the pairs that returned to rank q, L for each row.
  void expect_sums_of_pairs(int64_t q, const Values& back) {
    Rank& r = *ranks_[q];
    Array to = Array::poisoned({c().T, c().K}, DType::f32);
    sum_pairs(s_, {.to_TK = to.tensor(),
                   .from_BL = r.at(Rank::back_pairs),
                   .topk_TK = r.topk.tensor(),
                   .kept_TK = r.kept.tensor(),
                   .dest_TJ = r.dest.tensor(),
                   .back_row_TB = r.back_row.tensor(),
                   .experts_of_rank = c().e});
    Values want(c().T * c().K);
    for (int64_t b = 0; b < std::ssize(returns_[q]); ++b) {
      const std::vector<int64_t> pairs = pairs_at({q, returns_[q][b].token}, returns_[q][b].from);
      for (int64_t l = 0; l < std::ssize(pairs); ++l) {
        double& sum = want[returns_[q][b].token * c().K + pairs[l]];  // the etp ranks are in order
        sum = static_cast<float>(sum) + static_cast<float>(back[b * c().L() + l]);
      }
    }
    EXPECT_EQ(to.values(), want);
  }
  void send_routes(int64_t q) {
    Rank& r = *ranks_[q];
    sent_now(q);
    push_routes(s_, {.sent_1 = r.sent.tensor(),
                     .topk_TK = r.topk.tensor(),
                     .kept_TK = r.kept.tensor(),
                     .weight_TK = r.weight.tensor(),
                     .dest_TJ = r.dest.tensor(),
                     .row_TJ = r.row.tensor(),
                     .bases_W = bases_.tensor(),
                     .offset = r.offset[Rank::routes],
                     .rank = q,
                     .etp = c().etp,
                     .experts_of_rank = c().e});
    synchronize(s_);
    EXPECT_EQ(sent_now(q), left_[q] * static_cast<double>(8 * c().L()));
  }
  // The routes of the rows that arrive at rank q: L pairs of each, and none of the rows past the last one.
  struct RoutesHere {
    std::vector<int64_t> topk;
    Values weight;
  };
  RoutesHere expected_routes(int64_t q) {
    RoutesHere want;
    for (int64_t n = 0; n < c().N(); ++n) {
      const bool here = n < std::ssize(arrivals_[q]);
      const std::vector<int64_t> pairs = here ? pairs_at(arrivals_[q][n], q) : std::vector<int64_t>();
      for (const int64_t k : pairs) {
        const Arrival row = arrivals_[q][n];
        want.topk.push_back(expert_of(c(), row.from, row.token, k));
        want.weight.push_back(row_of(ranks_[row.from]->weight.tensor(), row.token)[k]);
      }
      want.topk.resize((n + 1) * c().L(), -1);
      want.weight.resize((n + 1) * c().L(), 0);
    }
    return want;
  }
  void expect_routes(int64_t q, const RoutesHere& want) {
    const Tensor routes = ranks_[q]->at(Rank::routes);
    synchronize(s_);
    for (int64_t n = 0; n < c().N(); ++n) {
      if (n >= std::ssize(arrivals_[q])) {
        ASSERT_TRUE(is_poison(routes, n)) << "a route that no row has was written";
        continue;
      }
      const int32_t* got = routes.ptr<int32_t>() + n * 2 * c().L();
      for (int64_t l = 0; l < c().L(); ++l) {
        ASSERT_EQ(got[l], want.topk[n * c().L() + l]);
        ASSERT_EQ(got[c().L() + l], std::bit_cast<int32_t>(static_cast<float>(want.weight[n * c().L() + l])));
      }
    }
  }
  // The results of the experts of a rank: random rows and values, for the pairs that arrived.
  struct Results {
    Array y, numbers, pair_row, weight;
    Values y_values = y.values(), number_values = numbers.values();
  };
  Results experts_results(int64_t q, const RoutesHere& want) {
    const int64_t R = c().N() * c().L(), first = c().e * (q / c().etp);
    Array offsets = Array::poisoned({c().e + 1}, DType::i32), token = Array::poisoned({R}, DType::i32);
    Array pair_row = Array::poisoned({c().N(), c().L()}, DType::i32);
    Array weight = Array::poisoned({c().N(), c().L()}, DType::f32);
    Array scratch(Shape{IndexRows::scratch_bytes(c().N(), c().e, s_)}, DType::u8);
    index_routes(s_, {.offsets_e1 = offsets.tensor(),
                      .row_token_R = token.tensor(),
                      .pair_row_NL = pair_row.tensor(),
                      .weight_NL = weight.tensor(),
                      .scratch = scratch.tensor(),
                      .routes_N2L = ranks_[q]->at(Rank::routes),
                      .arrive_GV = ranks_[q]->arrive.tensor().view({1, c().W() + 1}),
                      .first_expert = first});
    synchronize(s_);  // the arrays of this scope are in use until then
    EXPECT_EQ(weight.values(), want.weight);
    const ref::RowIndex index = ref::index_rows(want.topk, {}, c().L(), first, c().e);
    EXPECT_EQ(offsets.values(), Values(index.offsets.begin(), index.offsets.end()));
    EXPECT_EQ(pair_row.values(), Values(index.row_of_pair.begin(), index.row_of_pair.end()));
    Values tokens(index.token.begin(), index.token.end());
    tokens.resize(R, -1);
    EXPECT_EQ(token.values(), tokens);
    return {.y = Array::normal({R, c().D}, c().dtype, 300 + q),
            .numbers = Array::normal({R}, DType::f32, 400 + q),
            .pair_row = pair_row,
            .weight = weight};
  }
  // Runs all ranks until each has the results of its experts.
  void compute() {
    announce();
    for (int64_t q = 0; q < c().W(); ++q) send_routes(q);
    for (int64_t q = 0; q < c().W(); ++q) {
      const RoutesHere routes = expected_routes(q);
      expect_routes(q, routes);
      results_.push_back(experts_results(q, routes));
    }
  }
  // Both kinds of sums return: odd ranks return weighted sums, even ranks unweighted ones.
  static bool is_weighted(int64_t q) { return q % 2 == 1; }
  void return_part(int64_t q, const RowDistances& of) {
    Rank& r = *ranks_[q];
    Results& results = results_[q];
    return_sums(s_, {.sent_1 = r.sent.tensor(),
                     .y_RD = results.y.tensor(),
                     .pair_row_NL = results.pair_row.tensor(),
                     .weight_NL = is_weighted(q) ? results.weight.tensor() : Tensor{},
                     .arrive_W1 = r.arrive.tensor(),
                     .back_W = r.back_first.tensor(),
                     .bases_W = bases_.tensor(),
                     .offset = r.offset[Rank::back],
                     .rank = q,
                     .of = of});
  }
  void return_results(int64_t q) {
    Rank& r = *ranks_[q];
    Results& results = results_[q];
    sent_now(q);
    for (const RowDistances& of : c().parts()) return_part(q, of);
    EXPECT_EQ(sent_now(q), returned_[q] * static_cast<double>(c().D * size_of(c().dtype)));
    return_pairs(s_, {.sent_1 = r.sent.tensor(),
                      .from_R = results.numbers.tensor(),
                      .pair_row_NL = results.pair_row.tensor(),
                      .arrive_W1 = r.arrive.tensor(),
                      .back_W = r.back_first.tensor(),
                      .bases_W = bases_.tensor(),
                      .offset = r.offset[Rank::back_pairs],
                      .rank = q});
    EXPECT_EQ(sent_now(q), returned_[q] * static_cast<double>(c().L() * 4));
  }
  // Compares the sums and values that returned to rank q with the results.
  void expect_returned(int64_t q) {
    Values got, want, got_pairs, want_pairs;
    for (int64_t b = 0; b < c().B(); ++b) {
      if (b >= std::ssize(returns_[q])) {
        ASSERT_TRUE(is_poison(ranks_[q]->at(Rank::back), b)) << "a row that does not return was written";
        ASSERT_TRUE(is_poison(ranks_[q]->at(Rank::back_pairs), b));
        continue;
      }
      add_returned({q, returns_[q][b].token}, returns_[q][b].from, want, want_pairs);
      const Values have = row_of(ranks_[q]->at(Rank::back), b), pairs = row_of(ranks_[q]->at(Rank::back_pairs), b);
      got.insert(got.end(), have.begin(), have.end());
      got_pairs.insert(got_pairs.end(), pairs.begin(), pairs.end());
    }
    // K additions in f32 of terms near 1, rounded once.
    testing::expect_close("back", got, want, testing::epsilon(c().dtype), 0x1p-22 * static_cast<double>(c().K));
    EXPECT_EQ(got_pairs, want_pairs);
    expect_sums_of_pairs(q, want_pairs);
  }
  // Appends what rank `from` returns for a token: the sum of its rows, and the values of its pairs.
  void add_returned(const Arrival& token, int64_t from, Values& sums, Values& numbers) {
    const auto& there = arrivals_[from];
    const int64_t n = std::find(there.begin(), there.end(), token) - there.begin();
    Results& results = results_[from];
    const Values at = row_of(results.pair_row.tensor(), n), weight = row_of(results.weight.tensor(), n);
    Values sum(c().D);
    for (int64_t l = 0; l < c().L(); ++l) {
      const auto r = static_cast<int64_t>(at[l]);
      numbers.push_back(r < 0 ? 0 : results.number_values[r]);
      for (int64_t d = 0; r >= 0 && d < c().D; ++d)
        sum[d] += (is_weighted(from) ? weight[l] : 1) * results.y_values[r * c().D + d];
    }
    sums.insert(sums.end(), sum.begin(), sum.end());
  }
  // Returns the bytes that rank q sent since the last call.
  double sent_now(int64_t q) {
    const double all = ranks_[q]->sent.values()[0], now = all - sent_before_[q];
    sent_before_[q] = all;
    return now;
  }
  Values row_of(const Tensor& t, int64_t i) {
    synchronize(s_);
    Values row;
    for (int64_t d = 0; d < t.dim(1); ++d) {
      const int64_t at = i * t.dim(1) + d;
      row.push_back(t.dtype == DType::bf16  ? to_f32(t.ptr<bf16>()[at])
                    : t.dtype == DType::f32 ? t.ptr<float>()[at]
                                            : t.ptr<int32_t>()[at]);
    }
    return row;
  }
  bool is_poison(const Tensor& t, int64_t i) {
    synchronize(s_);
    const int64_t bytes = t.num_bytes() / t.dim(0);
    const auto* row = static_cast<const unsigned char*>(t.data) + i * bytes;
    return std::all_of(row, row + bytes, [](unsigned char byte) { return byte == 0xff; });
  }

  std::optional<BlockLimitScope> few_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  Array bases_;
  std::vector<ref::TokenExperts> experts_;
  std::vector<std::vector<Arrival>> arrivals_, returns_;
  std::vector<Results> results_;
  std::map<int64_t, double> left_, returned_, sent_before_;  // rows for other ranks
};

TEST_P(DispatchTest, RowsArriveOnceInTheOrderOfTheReference) { expect_rows_in_order(); }

// Each token gets one row from each of its ranks, in their order, at the places that it computed.
TEST_P(DispatchTest, TheRowsOfATokenReturnInTheOrderOfRanks) {
  announce();
  for (int64_t q = 0; q < c().W(); ++q) {
    const Values back_row = ranks_[q]->back_row.values();
    size_t seen = 0;
    for (int64_t t = 0; t < c().T; ++t) {
      std::vector<int64_t> from;
      for (int64_t b = 0; b < c().J() * c().etp; ++b) {
        const auto at = static_cast<int64_t>(back_row[t * c().J() * c().etp + b]);
        if (at < 0) continue;
        ASSERT_LT(at, std::ssize(returns_[q]));
        ASSERT_EQ(returns_[q][at].token, t);
        from.push_back(returns_[q][at].from);
        ++seen;
      }
      EXPECT_TRUE(std::is_sorted(from.begin(), from.end()));
      EXPECT_EQ(std::ssize(from), std::ssize(ref::destinations(experts_[q][t], c().e)) * c().etp);
    }
    EXPECT_EQ(seen, returns_[q].size());
  }
}

class PartsOfDispatchTest : public DispatchTest {
 protected:
  // Calls call(q, of) for all ranks, one part of the distances after another. Each call must move the rows at its
  // distances and no others: rows_at[q] are written to `array` of rank q. is_back: the rows return to the rank of
  // their token.
  template <class Call>
  void expect_parts(int array, const std::vector<std::vector<Arrival>>& rows_at, bool is_back, const Call& call) {
    const int64_t W = c().W();
    RowDistances before{.first = 0, .end = 0};
    for (const RowDistances& of : c().parts()) {
      std::vector<int64_t> sent(W);  // rows for other ranks, in this call
      for (int64_t q = 0; q < W; ++q) {
        sent_now(q);
        call(q, of);
      }
      for (int64_t q = 0; q < W; ++q) {
        for (int64_t i = 0; i < std::ssize(rows_at[q]); ++i) {
          const int64_t from = rows_at[q][i].from, distance = ((is_back ? from - q : q - from) + W) % W;
          const bool is_there = before.has(distance) || of.has(distance);
          ASSERT_NE(is_poison(ranks_[q]->at(array), i), is_there) << "row " << i << " of rank " << q;
          sent[from] += from != q && of.has(distance) ? 1 : 0;
        }
      }
      for (int64_t q = 0; q < W; ++q)
        EXPECT_EQ(sent_now(q), static_cast<double>(sent[q] * c().D * size_of(c().dtype))) << "rank " << q;
      before.end = of.end;
    }
  }
};

TEST_P(PartsOfDispatchTest, ACallPushesTheRowsAtItsDistances) {
  announce();
  expect_parts(Rank::tokens, arrivals_, /*is_back=*/false,
               [&](int64_t q, const RowDistances& of) { push_part(q, Rank::tokens, ranks_[q]->x.tensor(), of); });
}

TEST_P(PartsOfDispatchTest, ACallReturnsTheRowsAtItsDistances) {
  compute();
  expect_parts(Rank::back, returns_, /*is_back=*/true, [&](int64_t q, const RowDistances& of) { return_part(q, of); });
}

// The experts of each rank have results of their own, which return as sums and as values of pairs.
TEST_P(DispatchTest, SumsAndPairsReturn) {
  compute();
  for (int64_t q = 0; q < c().W(); ++q) return_results(q);
  for (int64_t q = 0; q < c().W(); ++q) expect_returned(q);
}

INSTANTIATE_TEST_SUITE_P(Shapes, DispatchTest, ::testing::ValuesIn(testing::on_each_device(cases())));

std::vector<Case> cases_in_parts() {
  std::vector<Case> all = cases();
  std::erase_if(all, [](const Case& c) { return c.ends_of_parts.empty(); });
  return all;
}
INSTANTIATE_TEST_SUITE_P(Shapes, PartsOfDispatchTest, ::testing::ValuesIn(testing::on_each_device(cases_in_parts())));

// The kernel of the bulk copy engine runs with 14 to 20 blocks. With 14, a warp that sends has over 130 of these
// rows, in batches of 4 whose 6 copies take 8 lanes each. A warp that keeps its rank's own rows has more than 32.
class PushOfManyRowsTest : public DispatchTest {};

TEST_P(PushOfManyRowsTest, RowsArrive) { expect_rows_in_order(); }

INSTANTIATE_TEST_SUITE_P(
    Shapes, PushOfManyRowsTest,
    ::testing::ValuesIn(testing::on_each_device(std::vector<Case>{
        {.P = 3, .etp = 2, .T = 7500, .e = 2, .K = 3, .D = 520, .dtype = DType::bf16, .blocks = 14}})));

TEST(Dispatch, MessagesOfTheChecks) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array ints = Array::of_ints({2, 2}, {0, 1, 0, 1}), bases(Shape{3}, DType::i64), sent(Shape{1}, DType::i64);
  const Tensor t = ints.tensor();
  expect_error(ErrorKind::usage,
               "destinations: experts_of_rank and the length of count must be at least 1; got 0 and 2",
               [&] { destinations(s, {.count_P = t.view({4}).rows(0, 2), .topk_TK = t, .experts_of_rank = 0}); });
  expect_error(ErrorKind::usage, "dispatch_places: counts must be [W, P] where P divides W, and the rank one of W",
               [&] { dispatch_places(s, {.dest_TJ = t, .counts_WP = t, .rank = 2}); });
  expect_error(ErrorKind::usage, "push_rows: etp must divide the 3 ranks; got 2",
               [&] { push_rows(s, {.sent_1 = sent.tensor(), .bases_W = bases.tensor(), .etp = 2}); });
  expect_error(ErrorKind::usage, "push_to_all: the rank must be one of 3; got 3",
               [&] { push_to_all(s, {.sent_1 = sent.tensor(), .bases_W = bases.tensor(), .rank = 3}); });
  expect_error(ErrorKind::usage, "push_routes: topk must be [T, K]; got i32[4]",
               [&] { push_routes(s, {.sent_1 = sent.tensor(), .topk_TK = t.view({4}), .bases_W = bases.tensor()}); });
  expect_error(ErrorKind::usage, "push_routes: etp must divide the 3 ranks, and a rank must have experts; got 1 and 0",
               [&] { push_routes(s, {.sent_1 = sent.tensor(), .bases_W = bases.tensor(), .experts_of_rank = 0}); });
  expect_error(ErrorKind::usage, "sum_pairs: from must be [B, L]; got i32[4]",
               [&] { sum_pairs(s, {.from_BL = t.view({4}), .topk_TK = t}); });
  expect_error(ErrorKind::usage, "return_sums: y must be f32 or bf16 [R, D]; got i32[2, 2]",
               [&] { return_sums(s, {.sent_1 = sent.tensor(), .y_RD = t, .bases_W = bases.tensor()}); });
}

TEST(Dispatch, NothingRunsOnTheNullDevice) {
  ThreadPool pool(1);
  Trace trace;
  Stream s(DeviceKind::null, pool, &trace);
  const Tensor none{.shape = {3, 4}, .dtype = DType::f32, .device = DeviceKind::null};
  Tensor ints = none, ids{.shape = {2}, .dtype = DType::i64, .device = DeviceKind::null}, one = ids;
  ints.dtype = DType::i32;
  ints.shape = {3, 2};
  one.shape = {1};
  push_rows(s, {.sent_1 = one, .x_TD = none, .dest_TJ = ints, .row_TJ = ints, .bases_W = ids});
  const ReturnSums sums{.sent_1 = one, .y_RD = none, .pair_row_NL = ints};
  EXPECT_EQ(cost(sums).flops, 2.0 * 6 * 4);
}

}  // namespace
}  // namespace moebius

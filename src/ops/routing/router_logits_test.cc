// The gate's products, and the parts that act on the whole batch: the expert bias and the loss
// of uniform routing.
#include "device/block_limit.h"
#include "device/gpu_limits.h"
#include "ops/cpu/testing.h"
#include "ops/elementwise/elementwise.h"
#include "ops/routing/router_logits_few.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t T, D, E;
  DType x, w;
};

void PrintTo(const testing::On<Case>& p, std::ostream* out) {
  const Case& c = p.c;
  *out << "T" << c.T << " D" << c.D << " E" << c.E << " " << name_of(c.x) << " " << name_of(c.w) << " on "
       << name_of(p.device);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const auto& [x, w] :
       {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
    for (const auto& [T, D, E] : std::vector<std::array<int64_t, 3>>{{0, 3, 2},
                                                                     {1, 1, 1},
                                                                     {5, 33, 7},
                                                                     {37, 64, 4},
                                                                     {70, 130, 9},
                                                                     {1030, 17, 3},
                                                                     {1100, 72, 130},
                                                                     {130, 264, 61},
                                                                     {130, 264, 100},
                                                                     {300, 131, 130},
                                                                     {1100, 34, 61},
                                                                     {130, 265, 7},
                                                                     {70, 200, 300}}) {
      all.push_back({T, D, E, x, w});
    }
  }
  return all;
}

// With scratch that nobody has written.
void run_fwd(Stream& s, RouterLogitsFwd a) {
  Array scratch = Array::poisoned({RouterLogitsFwd::scratch_bytes(a, s)}, DType::u8);
  a.scratch = scratch.tensor();
  router_logits_fwd(s, a);
  scratch.bytes();  // waits for the device
}
void run_bwd(Stream& s, RouterLogitsBwd a) {
  Array scratch = Array::poisoned({RouterLogitsBwd::scratch_bytes(a, s)}, DType::u8);
  Array partial = Array::poisoned({RouterLogitsBwd::num_partials(a, s), a.w_ED.dim(0), a.w_ED.dim(1)}, DType::f32);
  a.partial_PED = partial.tensor();
  a.scratch = scratch.tensor();
  router_logits_bwd(s, a);
  scratch.bytes();
}
void run_stats(Stream& s, BalanceStats a) {
  Array scratch = Array::poisoned(
      {BalanceStats::scratch_bytes(a.logits_TE.dim(0), a.logits_TE.dim(1), a.prob_SE.dim(0), s)}, DType::u8);
  a.scratch = scratch.tensor();
  balance_stats(s, a);
  scratch.bytes();
}

struct Outputs {
  Array logits, dx, dw, dbias;
};

Outputs run(Stream& s, const Case& c, Array& x, Array& w, Array& dlogits) {
  Outputs o{Array::poisoned({c.T, c.E}, DType::f32), Array::normal({c.T, c.D}, c.x, 4),
            Array::normal({c.E, c.D}, DType::f32, 5), Array::normal({c.E}, DType::f32, 7)};
  Array bias = Array::normal({c.E}, DType::f32, 6);
  run_fwd(s, {.logits_TE = o.logits.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor(), .bias_E = bias.tensor()});
  run_bwd(s, {.dx_TD = o.dx.tensor(),
              .dw_ED = o.dw.tensor(),
              .dbias_E = o.dbias.tensor(),
              .dlogits_TE = dlogits.tensor(),
              .x_TD = x.tensor(),
              .w_ED = w.tensor()});
  return o;
}

class RouterLogitsTest : public testing::DeviceTest<Case> {
 protected:
  void expect_reference();
};

void RouterLogitsTest::expect_reference() {
  const Case& c = this->c();
  Array x = Array::normal({c.T, c.D}, c.x, 1), w = Array::normal({c.E, c.D}, c.w, 2);
  Array dlogits = Array::normal({c.T, c.E}, DType::f32, 3);
  const Outputs got = run(s_, c, x, w, dlogits);
  Values logits(c.T * c.E), dx = Array::normal({c.T, c.D}, c.x, 4).values(),
                            dw = Array::normal({c.E, c.D}, DType::f32, 5).values(),
                            dbias = Array::normal({c.E}, DType::f32, 7).values();
  const Values bias = Array::normal({c.E}, DType::f32, 6).values();
  const Values xs = x.values(), ws = w.values(), ds = dlogits.values();
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t e = 0; e < c.E; ++e) {
      logits[t * c.E + e] = bias[e];
      dbias[e] += ds[t * c.E + e];
      for (int64_t d = 0; d < c.D; ++d) {
        logits[t * c.E + e] += xs[t * c.D + d] * ws[e * c.D + d];
        dx[t * c.D + d] += ds[t * c.E + e] * ws[e * c.D + d];
        dw[e * c.D + d] += ds[t * c.E + e] * xs[t * c.D + d];
      }
    }
  }
  const auto error = [](int64_t length) { return 0x1p-22 * std::sqrt(static_cast<double>(length)); };
  testing::expect_close("logits", got.logits.values(), logits, error(c.D), 1e-7);
  testing::expect_close("dx", got.dx.values(), dx, error(c.E) + testing::epsilon(c.x), 1e-7);
  testing::expect_close("dw", got.dw.values(), dw, error(c.T), 1e-7);
  testing::expect_close("dbias", got.dbias.values(), dbias, error(c.T), 1e-7);
  Array dx_of_frozen = Array::normal({c.T, c.D}, c.x, 4);
  run_bwd(s_, {.dx_TD = dx_of_frozen.tensor(), .dlogits_TE = dlogits.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor()});
  EXPECT_EQ(dx_of_frozen.bytes(), got.dx.bytes()) << "without the gradient of a frozen w";
  if (s_.device() != DeviceKind::cpu) {
    const Outputs again = run(s_, c, x, w, dlogits);
    EXPECT_EQ(again.logits.bytes(), got.logits.bytes());
    EXPECT_EQ(again.dx.bytes(), got.dx.bytes());
    EXPECT_EQ(again.dw.bytes(), got.dw.bytes());
    EXPECT_EQ(again.dbias.bytes(), got.dbias.bytes());
    for (const int blocks : {1, 3}) {  // each walks over many tiles; no sum depends on who computes what
      const BlockLimitScope few(s_, blocks);
      const Outputs by_few = run(s_, c, x, w, dlogits);
      EXPECT_EQ(by_few.logits.bytes(), got.logits.bytes()) << blocks;
      EXPECT_EQ(by_few.dx.bytes(), got.dx.bytes()) << blocks;
      EXPECT_EQ(by_few.dw.bytes(), got.dw.bytes()) << blocks;
      EXPECT_EQ(by_few.dbias.bytes(), got.dbias.bytes()) << blocks;
    }
    return;
  }
  testing::expect_same_bits_for_any_team([&](Stream& on) {
    const Outputs o = run(on, c, x, w, dlogits);
    return std::vector<Array>{o.logits, o.dx, o.dw, o.dbias};
  });
}

TEST_P(RouterLogitsTest, EqualsTheReferenceAndKeepsItsBits) { expect_reference(); }

TEST_P(RouterLogitsTest, EqualsTheReferenceAndKeepsItsBitsOnOtherGpus) {
  if (s_.device() != DeviceKind::cuda) GTEST_SKIP() << "the limits are a GPU's";
  const GpuLimitsScope other(s_, documented_gpu_limits(8, 9, 2));
  expect_reference();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RouterLogitsTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// The same sums in the same order: models with a bias keep their bits. 600 rows are three blocks of SumRows.
TEST(RouterLogits, ABiasHasTheBitsOfSeparateOps) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const auto& [T, D, E] : std::vector<std::array<int64_t, 3>>{{600, 64, 32}, {600, 33, 7}, {9, 72, 130}}) {
        SCOPED_TRACE(fmt::format("{} x {}, {} experts, {}", T, D, E, name_of(dtype)));
        Array x = Array::normal({T, D}, dtype, 1), w = Array::normal({E, D}, dtype, 2);
        Array bias = Array::normal({E}, DType::f32, 3), dlogits = Array::normal({T, E}, DType::f32, 4);
        Array one = Array::poisoned({T, E}, DType::f32), two = one;
        run_fwd(s, {.logits_TE = one.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor(), .bias_E = bias.tensor()});
        run_fwd(s, {.logits_TE = two.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor()});
        add_row(s, two.tensor(), bias.tensor().view({1, E}));
        EXPECT_EQ(one.bytes(), two.bytes());
        Array dbias = Array::normal({E}, DType::f32, 5), sums = Array::normal({E}, DType::f32, 5);
        run_bwd(s, {.dbias_E = dbias.tensor(), .dlogits_TE = dlogits.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor()});
        SumRows sum{.sum_C = sums.tensor(), .x_TC = dlogits.tensor()};
        Array scratch = Array::poisoned({SumRows::scratch_bytes(sum)}, DType::u8);
        sum.scratch = scratch.tensor();
        sum_rows(s, sum);
        EXPECT_EQ(dbias.bytes(), sums.bytes());
      }
    }
  });
}

TEST(RouterLogits, RowsDoNotDependOnOtherRows) {
  testing::on_each_device([](Stream& s) {
    for (const int64_t D : {50, 72}) {
      Array x = Array::normal({39, D}, DType::bf16, 1), w = Array::normal({5, D}, DType::f32, 2);
      Array all({39, 5}, DType::f32), one({1, 5}, DType::f32);
      run_fwd(s, {.logits_TE = all.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor()});
      for (const int64_t t : {0, 17, 38}) {
        run_fwd(s, {.logits_TE = one.tensor(), .x_TD = x.tensor().rows(t, t + 1), .w_ED = w.tensor()});
        EXPECT_EQ(std::memcmp(one.tensor().data, all.tensor().rows(t, t + 1).data, one.bytes().size()), 0) << t;
      }
    }
  });
}

TEST(RouterLogits, OfFewRowsEqualTheReferenceRowByRow) {
  testing::on_each_device([](Stream& s) {
    for (const auto& [x_dtype, w_dtype] :
         {std::pair{DType::f32, DType::f32}, {DType::bf16, DType::f32}, {DType::bf16, DType::bf16}}) {
      for (const auto& [D, E] :
           std::vector<std::pair<int64_t, int64_t>>{{8, 1}, {72, 5}, {33, 4}, {2048, 7}, {4104, 3}}) {
        Array x = Array::normal({32, D}, x_dtype, 1), w = Array::normal({E, D}, w_dtype, 2);
        Array bias = Array::normal({E}, DType::f32, 3);
        const auto logits = [&](int64_t begin, int64_t end) {
          Array out = Array::poisoned({end - begin, E}, DType::f32);
          RouterLogitsFwd few{.logits_TE = out.tensor(),
                              .x_TD = x.tensor().rows(begin, end),
                              .w_ED = w.tensor(),
                              .bias_E = bias.tensor()};
          Array scratch = Array::poisoned({RouterLogitsFwd::scratch_bytes(few, s)}, DType::u8);
          few.scratch = scratch.tensor();
          router_logits_few(s, few);
          return out.values();
        };
        const Values xs = x.values(), ws = w.values(), bs = bias.values(), all = logits(0, 32);
        Values want(32 * E);
        for (int64_t t = 0; t < 32; ++t) {
          for (int64_t e = 0; e < E; ++e) {
            want[t * E + e] = bs[e];
            for (int64_t d = 0; d < D; ++d) want[t * E + e] += xs[t * D + d] * ws[e * D + d];
          }
        }
        testing::expect_close("logits", all, want, 0x1p-22 * std::sqrt(static_cast<double>(D)), 1e-7);
        for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {13, 14}, {7, 20}, {31, 32}}) {
          const Values few = logits(begin, end);
          EXPECT_TRUE(std::equal(few.begin(), few.end(), all.begin() + begin * E)) << begin << ", D " << D;
        }
      }
    }
  });
}

// Hopper's kernels read w in bf16 at multiples of 16 bytes; others read it anywhere.
TEST(RouterLogits, WeightsMayBeginAtAnyAddress) {
  const Case c{130, 72, 9, DType::bf16, DType::bf16};
  testing::on_each_device([&](Stream& s) {
    Array x = Array::normal({c.T, c.D}, c.x, 1), w = Array::normal({c.E, c.D}, c.w, 2);
    Array dlogits = Array::normal({c.T, c.E}, DType::f32, 3), shifted({c.E * c.D + 1}, c.w);
    std::memcpy(static_cast<char*>(shifted.tensor().data) + 2, w.tensor().data, w.tensor().num_bytes());
    const Tensor w_ED = shifted.tensor().rows(1, c.E * c.D + 1).view({c.E, c.D});
    const Outputs want = run(s, c, x, w, dlogits);
    Array logits = Array::poisoned({c.T, c.E}, DType::f32), dx = Array::normal({c.T, c.D}, c.x, 4),
          bias = Array::normal({c.E}, DType::f32, 6);
    run_fwd(s, {.logits_TE = logits.tensor(), .x_TD = x.tensor(), .w_ED = w_ED, .bias_E = bias.tensor()});
    run_bwd(s, {.dx_TD = dx.tensor(), .dlogits_TE = dlogits.tensor(), .x_TD = x.tensor(), .w_ED = w_ED});
    testing::expect_close("logits", logits.values(), want.logits.values(), 0x1p-22 * std::sqrt(double(c.D)), 1e-7);
    testing::expect_close("dx", dx.values(), want.dx.values(), testing::epsilon(c.x), 1e-7);
  });
}

TEST(RouterLogits, AnAbsentDxIsNotWritten) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::normal({3, 4}, DType::f32, 1), w = Array::normal({2, 4}, DType::f32, 2), dw({2, 4}, DType::f32);
    Array dlogits = Array::normal({3, 2}, DType::f32, 3);
    run_bwd(s, {.dw_ED = dw.tensor(), .dlogits_TE = dlogits.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor()});
    EXPECT_GT(testing::norm_of(dw.values()), 0);
  });
}

TEST(RouterLogits, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({3, 4}, DType::f32), w({2, 5}, DType::f32), logits({3, 2}, DType::f32), i({3, 4}, DType::i32);
  EXPECT_EQ(testing::error_of(
                [&] { router_logits_fwd(s, {.logits_TE = logits.tensor(), .x_TD = x.tensor(), .w_ED = w.tensor()}); }),
            "router_logits_fwd: w must be f32[2, 4]; got f32[2, 5]");
  EXPECT_EQ(testing::error_of(
                [&] { router_logits_fwd(s, {.logits_TE = logits.tensor(), .x_TD = i.tensor(), .w_ED = w.tensor()}); }),
            "router_logits_fwd: x must be f32 or bf16 [T, D]; got i32[3, 4]");
  Array good_w({2, 4}, DType::f32), three({3}, DType::f32), partial({1, 2, 4}, DType::f32);
  EXPECT_EQ(
      testing::error_of([&] {
        router_logits_fwd(
            s, {.logits_TE = logits.tensor(), .x_TD = x.tensor(), .w_ED = good_w.tensor(), .bias_E = three.tensor()});
      }),
      "router_logits_fwd: bias must be f32[2]; got f32[3]");
  EXPECT_EQ(testing::error_of([&] {
              router_logits_bwd(s, {.dbias_E = three.tensor(),
                                    .partial_PED = partial.tensor(),
                                    .dlogits_TE = logits.tensor(),
                                    .x_TD = x.tensor(),
                                    .w_ED = good_w.tensor()});
            }),
            "router_logits_bwd: dbias must be f32[2]; got f32[3]");
}

TEST(BalanceLoss, UniformRoutingCostsTheCoefficient) {
  testing::on_each_device([](Stream& s) {
    for (const ScoreFunction score : {ScoreFunction::softmax, ScoreFunction::sigmoid}) {
      const int64_t T = 35, E = 7, K = 3;
      Array logits({T, E}, DType::f32), prob({1, E}, DType::f32), count({1, E}, DType::f32), dsbar({1, E}, DType::f32);
      Array z({1}, DType::f64), entropy({1}, DType::f64), loss({1}, DType::f64);
      run_stats(s, {.prob_SE = prob.tensor(),
                    .count_SE = count.tensor(),
                    .z_1 = z.tensor(),
                    .entropy_1 = entropy.tensor(),
                    .logits_TE = logits.tensor(),
                    .score = score,
                    .top_k = K});
      Array total = Array::of({1}, DType::f64, {T});
      balance_loss(s, {.loss_1 = loss.tensor(),
                       .dsbar_SE = dsbar.tensor(),
                       .prob_SE = prob.tensor(),
                       .count_SE = count.tensor(),
                       .total_tokens_1 = total.tensor(),
                       .coeff = 0.25f,
                       .top_k = K});
      EXPECT_NEAR(loss.values()[0], 0.25, 1e-6);
      EXPECT_NEAR(entropy.values()[0], T * std::log(7.0), 1e-4);
      EXPECT_NEAR(z.values()[0], T * std::pow(std::log(7.0), 2), 1e-4);
    }
  });
}

TEST(BalanceStats, EverySegmentIsSummedByItself) {
  const int64_t T = 3100, E = 3, S = 1500;
  std::vector<int32_t> segment(T);
  Values v(T * E), prob(S * E, 0.0), count(S * E, 0.0);
  for (int64_t t = 0; t < T; ++t) {
    // One of 100 tokens, then empty ones between segments of a few tokens.
    segment[t] = t < 100 ? 0 : static_cast<int32_t>(t / 7 * 3);
    v[t * E + t % E] = 1;
    for (int64_t i = 0; i < E; ++i)
      prob[segment[t] * E + i] += (i == t % E ? std::exp(1.0) : 1.0) / (2 + std::exp(1.0));
    count[segment[t] * E + t % E] += 1;
  }
  testing::on_each_device([&](Stream& s) {
    Array logits = Array::of({T, E}, DType::f32, v), segments = Array::of_ints({T}, segment);
    Array got_prob = Array::poisoned({S, E}, DType::f32), got_count = got_prob;
    Array z({1}, DType::f64), entropy({1}, DType::f64);
    run_stats(s, {.prob_SE = got_prob.tensor(),
                  .count_SE = got_count.tensor(),
                  .z_1 = z.tensor(),
                  .entropy_1 = entropy.tensor(),
                  .logits_TE = logits.tensor(),
                  .segment_T = segments.tensor()});
    EXPECT_EQ(got_count.values(), count);
    // Sums of at most 100 values.
    testing::expect_close("prob", got_prob.values(), prob, 1e-6, 0);
  });
}

// Pitfall: scores driven to zero must not make the sigmoid's probabilities, and the loss, vanish
// without a trace.
TEST(BalanceLoss, TinySigmoidsStillSumToOne) {
  testing::on_each_device([](Stream& s) {
    Array logits = Array::of({1, 3}, DType::f32, {-60, -60, -61}), prob({1, 3}, DType::f32), count({1, 3}, DType::f32);
    Array z({1}, DType::f64), entropy({1}, DType::f64);
    run_stats(s, {.prob_SE = prob.tensor(),
                  .count_SE = count.tensor(),
                  .z_1 = z.tensor(),
                  .entropy_1 = entropy.tensor(),
                  .logits_TE = logits.tensor(),
                  .score = ScoreFunction::sigmoid});
    const double sum = 2 + std::exp(-1.0);
    testing::expect_close("prob", prob.values(), {1 / sum, 1 / sum, std::exp(-1.0) / sum}, 1e-5, 0);
  });
}

TEST(BalanceLoss, AnEmptySegmentAddsNothing) {
  testing::on_each_device([](Stream& s) {
    Array prob({2, 3}, DType::f32), count({2, 3}, DType::f32), dsbar({2, 3}, DType::f32), loss({1}, DType::f64);
    Array total = Array::of({1}, DType::f64, {4});
    balance_loss(s, {.loss_1 = loss.tensor(),
                     .dsbar_SE = dsbar.tensor(),
                     .prob_SE = prob.tensor(),
                     .count_SE = count.tensor(),
                     .total_tokens_1 = total.tensor(),
                     .coeff = 1,
                     .top_k = 1});
    EXPECT_EQ(loss.values()[0], 0);
    EXPECT_EQ(dsbar.values(), Values(6, 0.0));
  });
}

TEST(BalanceLoss, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array prob({2, 3}, DType::f32), count({2, 4}, DType::f32), loss({1}, DType::f64), z({1}, DType::f64),
      logits({5, 3}, DType::f32);
  BalanceLoss a{
      .loss_1 = loss.tensor(), .dsbar_SE = prob.tensor(), .prob_SE = prob.tensor(), .count_SE = count.tensor()};
  EXPECT_EQ(testing::error_of([&] { balance_loss(s, a); }), "balance_loss: count must be f32[2, 3]; got f32[2, 4]");
  a.count_SE = prob.tensor();
  a.total_tokens_1 = prob.tensor();
  EXPECT_EQ(testing::error_of([&] { balance_loss(s, a); }), "balance_loss: total_tokens must be f64[1]; got f32[2, 3]");
  const BalanceStats b{.prob_SE = prob.tensor(),
                       .count_SE = prob.tensor(),
                       .z_1 = z.tensor(),
                       .entropy_1 = z.tensor(),
                       .logits_TE = logits.tensor()};
  EXPECT_EQ(testing::error_of([&] { balance_stats(s, b); }),
            "balance_stats: without segments there is one; got f32[2, 3]");
}

TEST(ExpertBias, FollowsTheLoadImbalanceAndResetsTheLoad) {
  testing::on_each_device([](Stream& s) {
    Array bias = Array::of({4}, DType::f32, {0, 1, 0, -1});
    Array load = Array::of({4}, DType::i64, {5, 3, 4, 4});
    update_expert_bias(s, bias.tensor(), load.tensor(), 0.5f);
    EXPECT_EQ(bias.values(), (Values{-0.5, 1.5, 0, -1}));
    EXPECT_EQ(load.values(), Values(4, 0));
    EXPECT_EQ(testing::error_of([&] { update_expert_bias(s, bias.tensor(), bias.tensor(), 0.5f); }),
              "update_expert_bias: load must be i64[4]; got f32[4]");
  });
}

}  // namespace
}  // namespace moebius

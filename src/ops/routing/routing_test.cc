#include "ops/routing/routing.h"

#include <map>

#include "ops/routing/route_testing.h"
#include "ops/routing/routing_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::expect_consistent;
using testing::Routing;
using testing::Values;

struct Case {
  std::string name;
  int64_t T, E, K;
  RouteRule rule;
  bool bias = false;
  double grid = 0;  // logits are multiples of this; 0: any number
};

void PrintTo(const testing::On<Case>& p, std::ostream* out) { *out << p.c.name << " on " << name_of(p.device); }

std::vector<Case> cases() {
  const auto sigmoid = ScoreFunction::sigmoid;
  return {
      {"empty", 0, 5, 2, {}},
      {"one", 1, 1, 1, {}},
      {"every_expert", 9, 7, 7, {.normalize = true, .scale = 0.5f}},
      {"switch", 130, 6, 1, {}},
      {"mixtral", 131, 8, 2, {.normalize = true}},
      {"olmoe", 34, 33, 8, {}},
      {"qwen3", 23, 128, 8, {.normalize = true}},
      {"wide", 12, 300, 33, {.score = sigmoid, .normalize = true}, true},
      {"widest", 3, 1024, 40, {}},
      {"ties", 150, 7, 3, {.normalize = true}, false, 1},
      {"all_alike", 129, 5, 2, {}, false, 100},
      {"sigmoid", 45, 12, 3, {.score = sigmoid}},
      {"sigmoid_bias", 45, 12, 3, {.score = sigmoid, .normalize = true, .scale = 2.5f}, true},
      {"softmax_bias", 45, 12, 3, {.normalize = true, .scale = 2.5f}, true},
      {"deepseek_v2", 33, 20, 4, {.scale = 16, .num_groups = 5, .topk_groups = 2, .group_score = GroupScore::max}},
      {"deepseek_v3",
       77,
       32,
       8,
       {.score = sigmoid, .normalize = true, .scale = 2.5f, .num_groups = 8, .topk_groups = 4},
       true},
      {"wide_groups",
       12,
       256,
       8,
       {.score = sigmoid, .normalize = true, .scale = 2.5f, .num_groups = 8, .topk_groups = 4},
       true},
      {"sum_of_two",
       29,
       12,
       3,
       {.score = sigmoid, .num_groups = 4, .topk_groups = 3, .group_score = GroupScore::sum_of_two},
       true},
      {"group_ties", 77, 12, 2, {.num_groups = 4, .topk_groups = 2}, false, 1},
      {"forced", 21, 5, 3, {.choice = RouteChoice::forced, .normalize = true}},
      {"sinkhorn_1", 140, 5, 1, {.choice = RouteChoice::sinkhorn}},
      {"sinkhorn_2", 140, 9, 2, {.choice = RouteChoice::sinkhorn}},
      {"drop_probs", 150, 7, 2, {.normalize = true, .capacity = 31}},
      {"drop_position", 150, 7, 2, {.normalize = true, .capacity = 31, .drop = RouteDrop::position}},
      {"drop_one_left", 300, 3, 1, {.score = sigmoid, .capacity = 1}},
      {"drop_alike", 300, 3, 1, {.capacity = 7}, false, 100},
  };
}

Array logits_of(const Case& c, double scale = 1.5) {
  Values v = Array::normal({c.T, c.E}, DType::f32, 7, scale).values();
  for (double& x : v) x = c.grid > 0 ? std::round(x / c.grid) * c.grid : x;
  return Array::of({c.T, c.E}, DType::f32, v);
}

Array bias_of(const Case& c) { return c.bias ? Array::normal({c.E}, DType::f32, 8, 0.3) : Array(); }

class RouteTest : public testing::DeviceTest<Case> {};

std::string name_of_case(const ::testing::TestParamInfo<testing::On<Case>>& info) {
  return info.param.c.name + "_" + std::string(name_of(info.param.device));
}

TEST_P(RouteTest, EqualsTheReference) {
  const Case& c = this->c();
  const Array logits = logits_of(c), bias = bias_of(c);
  Routing r(c.T, c.E, c.K);
  r.run(s_, logits, bias, c.rule);
  expect_consistent(r);

  const auto chosen = ref::choose(c.rule, logits.values(), bias.values(), c.T, c.E, c.K);
  EXPECT_EQ(r.plan.topk.values(), Values(chosen.begin(), chosen.end()));
  Values weight = ref::weigh(c.rule, logits.values(), chosen, c.T, c.E, c.K);
  const auto drop = ref::dropped(c.rule, chosen, weight, c.E);
  const Values rows = r.plan.pair_row.values();
  for (size_t p = 0; p < drop.size(); ++p) {
    weight[p] = drop[p] ? 0 : weight[p];
    EXPECT_EQ(rows[p] < 0, drop[p]) << "pair " << p;
  }
  // A few roundings of an exponential, a sum and a quotient.
  testing::expect_close("weight", r.plan.weight.values(), weight, 1e-6, 1e-9);
}

// The CPU's bits: for any team, on any device.
TEST_P(RouteTest, SameBitsForAnyTeamAndDevice) {
  const Case& c = this->c();
  const auto run = [&](Stream& s) {
    Routing r(c.T, c.E, c.K);
    r.run(s, logits_of(c), bias_of(c), c.rule);
    return r.plan.arrays();
  };
  if (s_.device() == DeviceKind::cpu) return testing::expect_same_bits_for_any_team(run);
  Stream cpu(DeviceKind::cpu, pool_);
  const std::vector<Array> want = run(cpu), got = run(s_);
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i].bytes(), want[i].bytes()) << "array " << i;
}

TEST_P(RouteTest, SufficientCapacityEqualsDroplessBitwise) {
  Case c = this->c();
  c.rule.capacity = 0;
  Routing dropless(c.T, c.E, c.K);
  dropless.run(s_, logits_of(c), bias_of(c), c.rule);
  for (const RouteDrop drop : {RouteDrop::probs, RouteDrop::position}) {
    c.rule.capacity = c.T + 1;
    c.rule.drop = drop;
    Routing r(c.T, c.E, c.K);
    r.run(s_, logits_of(c), bias_of(c), c.rule);
    for (size_t i = 0; i < r.plan.arrays().size(); ++i) {
      EXPECT_EQ(r.plan.arrays()[i].bytes(), dropless.plan.arrays()[i].bytes()) << "array " << i;
    }
    EXPECT_EQ(r.num_dropped(), 0);
  }
}

// The whole scalar: probed weights, balance losses by segment, and z. What is chosen, kept and
// counted is constant.
struct Scalar {
  const Case& c;
  std::vector<int64_t> chosen;
  std::vector<bool> drop;
  std::vector<int32_t> segment;
  Values probe, count;
  int64_t S = 3;
  double coeff = 0.7, total = 11, z_coeff = 3.3;

  double operator()(const Values& logits) const {
    const Values weight = ref::weigh(c.rule, logits, chosen, c.T, c.E, c.K);
    double loss = 0;
    for (size_t p = 0; p < weight.size(); ++p) loss += drop[p] ? 0 : probe[p] * weight[p];
    ref::Balance b = ref::balance(c.rule.score, logits, segment, S, c.E, c.K);
    b.count = count;
    loss += ref::balance_loss(b, coeff, S, c.E, c.K, total);
    for (int64_t t = 0; t < c.T; ++t) loss += z_coeff / total * std::pow(ref::logsumexp(&logits[t * c.E], c.E), 2);
    return loss;
  }
};

TEST_P(RouteTest, GradientsEqualFiniteDifferencesOfAllTerms) {
  const Case& c = this->c();
  Array logits = logits_of(c);
  Routing r(c.T, c.E, c.K);
  r.run(s_, logits, bias_of(c), c.rule);

  Scalar scalar{.c = c};
  for (const double e : r.plan.topk.values()) scalar.chosen.push_back(static_cast<int64_t>(e));
  for (const double row : r.plan.pair_row.values()) scalar.drop.push_back(row < 0);
  for (int64_t t = 0; t < c.T; ++t) scalar.segment.push_back(t < c.T / 3 ? 0 : 2);  // segment 1 is empty
  Array probe = Array::normal({c.T, c.K}, DType::f32, 9);
  scalar.probe = probe.values();

  Array segment = Array::of_ints({c.T}, scalar.segment);
  Array prob = Array::poisoned({3, c.E}, DType::f32), count = prob, dsbar({3, c.E}, DType::f32);
  Array z({1}, DType::f64), entropy({1}, DType::f64), loss({1}, DType::f64);
  Array scratch = Array::poisoned({BalanceStats::scratch_bytes(c.T, c.E, 3, s_)}, DType::u8);
  balance_stats(s_, {.prob_SE = prob.tensor(),
                     .count_SE = count.tensor(),
                     .z_1 = z.tensor(),
                     .entropy_1 = entropy.tensor(),
                     .scratch = scratch.tensor(),
                     .logits_TE = logits.tensor(),
                     .segment_T = segment.tensor(),
                     .score = c.rule.score,
                     .top_k = c.K});
  const ref::Balance want = ref::balance(c.rule.score, logits.values(), scalar.segment, 3, c.E, c.K);
  EXPECT_EQ(count.values(), want.count);
  // Sums of at most T probabilities in f32.
  testing::expect_close("prob", prob.values(), want.prob, 1e-5, 1e-7);
  scalar.count = want.count;
  Array total = Array::of({1}, DType::f64, {scalar.total});
  balance_loss(s_, {.loss_1 = loss.tensor(),
                    .dsbar_SE = dsbar.tensor(),
                    .prob_SE = prob.tensor(),
                    .count_SE = count.tensor(),
                    .total_tokens_1 = total.tensor(),
                    .coeff = 0.7f,
                    .top_k = c.K});
  testing::expect_close("loss", loss.values(), {ref::balance_loss(want, 0.7, 3, c.E, c.K, scalar.total)}, 1e-5, 1e-12);
  Values x = logits.values();
  double want_z = 0, want_entropy = 0;
  for (int64_t t = 0; t < c.T; ++t) {
    want_z += std::pow(ref::logsumexp(&x[t * c.E], c.E), 2);
    for (const double p : ref::sbar(c.rule.score, &x[t * c.E], c.E)) want_entropy -= p * std::log(p);
  }
  testing::expect_close("z", z.values(), {want_z}, 1e-6, 1e-12);
  testing::expect_close("entropy", entropy.values(), {want_entropy}, 1e-6, 1e-6);

  Array dlogits = Array::poisoned({c.T, c.E}, DType::f32);
  route_bwd(s_, {.dlogits_TE = dlogits.tensor(),
                 .dweight_TK = probe.tensor(),
                 .dsbar_SE = dsbar.tensor(),
                 .segment_T = segment.tensor(),
                 .logits_TE = logits.tensor(),
                 .route = r.plan.route(),
                 .total_tokens_1 = total.tensor(),
                 .rule = c.rule,
                 .z_coeff = scalar.z_coeff});
  Values differences(c.T * c.E);
  // Every eleventh token is a sample of all.
  for (int64_t i = 0; i < c.T * c.E; ++i) {
    if (i / c.E % 11 != 0) continue;
    const double h = 1e-5, old = x[i];
    x[i] = old + h;
    const double above = scalar(x);
    x[i] = old - h;
    differences[i] = (above - scalar(x)) / (2 * h);
    x[i] = old;
  }
  Values got = dlogits.values();
  for (int64_t i = 0; i < c.T * c.E; ++i) {
    ASSERT_TRUE(std::isfinite(got[i]));
    if (i / c.E % 11 != 0) got[i] = 0;
  }
  // f32 scores and lse against h^2 and eps/h of the differences.
  testing::expect_close("dlogits", got, differences, 1e-5, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Rules, RouteTest, ::testing::ValuesIn(testing::on_each_device(cases())), name_of_case);

TEST(Route, OneExpertMayTakeAllAndOthersNone) {
  testing::on_each_device([](Stream& s) {
    const int64_t T = 257, E = 5;
    Values v(T * E, 0.0);
    for (int64_t t = 0; t < T; ++t) v[t * E + 3] = 9;
    Routing r(T, E, 1);
    r.run(s, Array::of({T, E}, DType::f32, v), Array(), {});
    expect_consistent(r);
    EXPECT_EQ(r.plan.counts.values(), (Values{0, 0, 0, T, 0}));
  });
}

TEST(Route, LoadAndDropsAccumulate) {
  testing::on_each_device([](Stream& s) {
    Routing r(4, 2, 1);
    const Array logits = Array::of({4, 2}, DType::f32, {1, 0, 1, 0, 1, 0, 0, 1});
    r.run(s, logits, Array(), {.capacity = 2});
    r.run(s, logits, Array(), {.capacity = 2});
    EXPECT_EQ(r.load.values(), (Values{6, 2}));
    EXPECT_EQ(r.num_dropped(), 2);
  });
}

TEST(Route, EqualWeightsDropLaterTokensWithoutRenormalising) {
  testing::on_each_device([](Stream& s) {
    for (const RouteDrop drop : {RouteDrop::probs, RouteDrop::position}) {
      Routing r(3, 2, 2);
      r.run(s, Array({3, 2}, DType::f32), Array(), {.normalize = true, .capacity = 2, .drop = drop});
      EXPECT_EQ(r.plan.pair_row.values(), (Values{0, 2, 1, 3, -1, -1}));
      EXPECT_EQ(r.plan.weight.values(), (Values{0.5, 0.5, 0.5, 0.5, 0, 0}));
    }
  });
}

TEST(Route, BiasChoosesButDoesNotWeigh) {
  testing::on_each_device([](Stream& s) {
    Routing r(1, 3, 1);
    r.run(s, Array::of({1, 3}, DType::f32, {2, 0, 0}), Array::of({3}, DType::f32, {0, 0, 5}),
          {.score = ScoreFunction::sigmoid});
    EXPECT_EQ(r.plan.topk.values(), Values{2});
    EXPECT_NEAR(r.plan.weight.values()[0], 0.5, 1e-6);
  });
}

TEST(Route, ScoresThatVanishStillNormalise) {
  testing::on_each_device([](Stream& s) {
    Routing r(1, 3, 2);
    r.run(s, Array::of({1, 3}, DType::f32, {500, 1, 0}), Array::of({3}, DType::f32, {0, 5, 5}), {.normalize = true});
    testing::expect_close("weight", r.plan.weight.values(), {1 / (1 + std::exp(-1.0)), 1 / (1 + std::exp(1.0))}, 1e-6,
                          0);
  });
}

TEST(Route, NaNLogitsGiveAValidRouteOfNaNWeights) {
  testing::on_each_device([](Stream& s) {
    for (const RouteChoice choice : {RouteChoice::scores, RouteChoice::sinkhorn}) {
      Routing r(3, 5, 2);
      r.run(s, Array::poisoned({3, 5}, DType::f32), Array(), {.choice = choice, .normalize = true});
      expect_consistent(r);
      for (const double w : r.plan.weight.values()) EXPECT_TRUE(std::isnan(w));
    }
  });
}

TEST(Route, SinkhornBalancesWhatTopKDoesNot) {
  testing::on_each_device([](Stream& s) {
    const int64_t T = 512, E = 8;
    Values v = Array::normal({T, E}, DType::f32, 3).values();
    for (int64_t t = 0; t < T; ++t) v[t * E + 2] += 3;  // everybody likes expert 2
    const Array logits = Array::of({T, E}, DType::f32, v);
    Routing plain(T, E, 1), balanced(T, E, 1);
    plain.run(s, logits, Array(), {});
    balanced.run(s, logits, Array(), {.choice = RouteChoice::sinkhorn});
    EXPECT_GT(plain.plan.counts.values()[2], T / 2);
    for (const double count : balanced.plan.counts.values()) EXPECT_NEAR(count, T / E, T / E / 2);
  });
}

TEST(Route, ForcedChoiceIsExactlyBalanced) {
  testing::on_each_device([](Stream& s) {
    Routing r(64, 8, 2);
    r.run(s, Array::normal({64, 8}, DType::f32, 3), Array(), {.choice = RouteChoice::forced});
    EXPECT_EQ(r.plan.counts.values(), Values(8, 16));
  });
}

TEST(Route, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  const auto error = [&](Stream& on, int64_t E, int64_t K, const RouteRule& rule, const Array& bias = Array()) {
    Routing r(2, E, K);
    return testing::error_of([&] { r.run(on, Array({2, E}, DType::f32), bias, rule); });
  };
  EXPECT_EQ(error(s, 1025, 1, {}), "route_fwd: the number of experts must be between 1 and 1024; got 1025");
  EXPECT_EQ(error(s, 4, 5, {}), "route_fwd: top-k must be between 1 and 4 experts; got 5");
  EXPECT_EQ(error(s, 4, 1, {.num_groups = 3}), "route_fwd: num_groups must divide 4 experts; got 3");
  EXPECT_EQ(error(s, 4, 1, {.num_groups = 2, .topk_groups = 3}),
            "route_fwd: topk_groups must be between 1 and 2 groups; got 3");
  EXPECT_EQ(error(s, 4, 3, {.num_groups = 2}),
            "route_fwd: top-k 3 needs more experts than 1 groups of 2 have; keep more groups");
  EXPECT_EQ(error(s, 4, 1, {.choice = RouteChoice::sinkhorn}, Array({4}, DType::f32)),
            "route_fwd: sinkhorn balances by itself; it takes no bias and no groups");
  EXPECT_EQ(error(s, 4, 1, {.capacity = -1}), "route_fwd: capacity must not be negative; got -1");
  EXPECT_EQ(error(s, 4, 1, {}, Array({3}, DType::f32)), "route_fwd: bias must be f32[4]; got f32[3]");
  Array logits({2, 4}, DType::f32);
  Routing r(2, 4, 1);
  EXPECT_EQ(testing::error_of([&] { route_fwd(s, {.route = r.plan.route(), .logits_TE = logits.tensor()}); }),
            "route_fwd: scratch must have 64 bytes; got 0");
  EXPECT_EQ(testing::error_of([&] { route_fwd(s, {.route = r.plan.route(), .logits_TE = logits.tensor().view({8})}); }),
            "route_fwd: logits must be f32 [T, E]; got f32[8]");
}

TEST(Route, NullDeviceCounts) {
  const auto null_i32 = [](Shape shape) { return testing::null_tensor(shape, DType::i32); };
  const RouteFwd a{.route = {.topk_TK = null_i32({7, 2}),
                             .weight_TK = testing::null_tensor({7, 2}),
                             .counts_E = null_i32({5}),
                             .offsets_E1 = null_i32({6}),
                             .row_token_R = null_i32({14}),
                             .row_pair_R = null_i32({14}),
                             .pair_row_TK = null_i32({7, 2})},
                   .scratch = testing::null_tensor({1024}, DType::u8),
                   .logits_TE = testing::null_tensor({7, 5})};
  const Cost cost = testing::cost_on_null([&](Stream& s) { route_fwd(s, a); });
  EXPECT_EQ(cost.flops, 7 * 5 * 12);
  EXPECT_EQ(cost.bytes, 4 * (7 * 5 + 5 * 14));
}

}  // namespace
}  // namespace moebius

// QK-clip: the logits of a head that is clipped, and the same numbers on every layout.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "engine/engine_testing.h"
#include "model/attention/max_logits.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "tests/equivalence/tiny.h"

namespace moebius {
namespace {

// --- what it does ---------------------------------------------------------------------------------------------------

// Steps with a learning rate of 0 and the same tokens: only clipping changes weights.
std::vector<std::vector<float>> logits_of_first_layer(const ModelSpec& model, double threshold, int num_steps) {
  EngineSpec spec = testing::tiny_engine(model, 2, DType::f32, 1);
  spec.optimizer->qk_clip = threshold;
  spec.num_micro_batches = 2;
  Engine engine(spec);
  testing::init_params(engine);
  std::vector<std::vector<float>> of_steps;
  for (int step = 1; step <= num_steps; ++step) {
    for (int64_t m = 0; m < 2; ++m) testing::fill_random(engine.batch(m), spec.model, 1, 2 * m, 4);
    engine.step(step, 0);
    const Tensor max_H = engine.model().max_logits()->layers().front().max_H();
    of_steps.emplace_back(max_H.ptr<float>(), max_H.ptr<float>() + max_H.numel());
    engine.end_of_step();
  }
  return of_steps;
}

void expect_clipped(const ModelSpec& model) {
  const int64_t group = model.num_heads / model.num_kv_heads;
  const std::vector<float> before = logits_of_first_layer(model, 1e9, 1)[0];
  const float threshold = *std::max_element(before.begin(), before.end()) / 3;
  ASSERT_GT(threshold, 0);
  const std::vector<std::vector<float>> logits = logits_of_first_layer(model, threshold, 2);
  EXPECT_EQ(logits[0], before);
  int clipped = 0;
  for (int64_t h = 0; h < std::ssize(before); ++h) {
    const auto first = before.begin() + h / group * group;
    const float largest = *std::max_element(first, first + group);
    const float gamma = largest > threshold ? threshold / largest : 1;
    clipped += gamma < 1;
    EXPECT_NEAR(logits[1][h], gamma * before[h], 1e-5 * threshold) << h;
  }
  EXPECT_GT(clipped, 0);
}

ModelSpec without_norms(ModelSpec m) {
  m.qk_norm = QkNorm::none;
  return m;
}

TEST(QkClip, ScalesTheLogitsOfGroupedHeads) { expect_clipped(without_norms(testing::tiny_model())); }

TEST(QkClip, ScalesTheLogitsOfHeadsWithBiases) {
  ModelSpec m = without_norms(testing::tiny_model());
  m.qkv_bias = true;
  expect_clipped(m);
}

TEST(QkClip, ScalesTheLogitsOfLatentHeads) {
  for (const int64_t query_latent : {0, 10}) {
    ModelSpec m = testing::latent_model();
    m.q_lora_rank = query_latent;
    expect_clipped(m);
  }
}

// --- layouts --------------------------------------------------------------------------------------------------------

struct Case {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model;
  bool same_bits = false;  // as one rank
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

const LayoutModel kGrouped{.gpt_oss = true}, kLatent{.latent_qkv = true}, kNoQueryLatent{.latent_kv = true};

const Case kCases[] = {
    {"dp2", 2, {}, kGrouped},
    {"tp2", 2, {.tp = 2}, kGrouped},
    {"cp2", 2, {.cp = 2}, kGrouped},
    {"cp2_ring", 2, {.cp = 2, .cp_comm = CpComm::ring}, kGrouped},
    {"cp2_alltoall", 2, {.cp = 2, .cp_comm = CpComm::alltoall}, kGrouped},
    {"pp2_vpp2", 2, {.pp = 2, .vpp = 2}, kGrouped, true},
    {"tp2_cp2_dp2", 8, {.tp = 2, .cp = 2}, kGrouped},
    {"ep2_edp2", 4, {.ep = 2}, kGrouped},
    {"dp2_latent", 2, {}, kLatent},
    {"tp2_latent", 2, {.tp = 2}, kLatent},
    {"cp2_latent", 2, {.cp = 2}, kLatent},
    {"cp2_ring_latent", 2, {.cp = 2, .cp_comm = CpComm::ring}, kLatent},
    {"cp2_alltoall_latent", 2, {.cp = 2, .cp_comm = CpComm::alltoall}, kLatent},
    {"pp2_latent", 2, {.pp = 2}, kLatent, true},
    {"tp2_pp2_no_query_latent", 4, {.tp = 2, .pp = 2}, kNoQueryLatent},
};

class QkClipLayouts : public ::testing::TestWithParam<Case> {};

constexpr int64_t kSteps = 2;

LayoutOutcome alone(const LayoutModel& model, double threshold) {
  const std::unique_ptr<Transport> self = make_self_transport();
  return train_on(*self, model, {}, kSteps, {.qk_clip = threshold});
}

struct OneRank {
  double threshold;  // half of the largest logit without clipping
  LayoutOutcome outcome;
};

// One run on one rank serves every layout of the same model.
const OneRank& one_rank(const LayoutModel& model) {
  static std::map<LayoutModel, OneRank> runs;
  const auto [at, is_new] = runs.try_emplace(model);
  if (!is_new) return at->second;
  const double threshold = alone(model, 1e9).steps[0].qk_clip->max_logit / 2;
  return at->second = {threshold, alone(model, threshold)};
}

TEST_P(QkClipLayouts, ClipAsOneRankDoes) {
  const Case& c = GetParam();
  const OneRank& alone = one_rank(c.model);
  const double threshold = alone.threshold;
  const LayoutOutcome& one = alone.outcome;
  EXPECT_GT(one.steps[0].qk_clip->clipped_heads, 0);
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got = train_on(world, c.model, c.layout, kSteps, {.qk_clip = threshold});
    c.same_bits ? expect_same_bits(got, one) : expect_same(got, one);
    for (int64_t i = 0; i < kSteps; ++i) {
      EXPECT_EQ(got.steps[i].qk_clip->clipped_heads, one.steps[i].qk_clip->clipped_heads);
      EXPECT_NEAR(got.steps[i].qk_clip->max_logit / one.steps[i].qk_clip->max_logit, 1, c.same_bits ? 0 : 1e-4);
    }
    RecomputeSpec layer;
    layer.layer = true;
    const LayoutWay ways[] = {{.overlap = false, .recompute = layer, .qk_clip = threshold},
                              {.fsdp = true, .qk_clip = threshold}};
    for (const LayoutWay& way : ways) expect_same_bits(train_on(world, c.model, c.layout, kSteps, way), got);
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, QkClipLayouts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

}  // namespace
}  // namespace moebius

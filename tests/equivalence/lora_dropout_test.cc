// Dropout of adapters' inputs: its derivative, what it is independent of, and where it is off.
#include <gtest/gtest.h>

#include "tests/equivalence/tiny.h"

namespace moebius {
namespace {

using namespace testing;

struct Case {
  const char* name;
  ModelSpec model;
  std::vector<std::string> targets = {"*"};
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

std::vector<Case> cases() {
  return {{"everywhere", tiny_model()},
          {"latent", latent_model()},
          {"attention", tiny_model(), {"q_proj", "v_proj", "o_proj"}},
          {"experts", tiny_model(), {"mlp.experts.*"}},
          {"router", tiny_model(), {"mlp.gate"}}};
}

EngineSpec spec_of(const Case& c, double dropout = 0.3) {
  EngineSpec spec = tiny_engine(c.model, 2, DType::f32, 2);
  spec.balance = {};
  spec.lora = {.rank = 3, .alpha = 4.5, .dropout = dropout, .targets = c.targets};
  return spec;
}

// A and B are drawn: with B = 0 neither dropout nor the gradient of A would show.
std::vector<float> drawn(Engine& engine) {
  init_params(engine);
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.kind != ParamKind::adapter || p.spec.init != ParamInit::zeros) continue;
    const Rng rng(5, RngSite::bench, 0, key_of(p.spec.name.c_str()));
    for (int64_t i = 0; i < p.w.numel(); ++i) p.w.ptr<float>()[i] = 0.1f * rng.normal(i);
  }
  return all_elements(engine, false);
}

void set_elements(Engine& engine, const std::vector<float>& all) {
  size_t at = 0;
  for (const Param& p : engine.model().params().all()) {
    if (!p.has_grad) continue;
    for (int64_t i = 0; i < p.w.numel(); ++i) p.w.ptr<float>()[i] = all[at++];
  }
}

double loss_of(Engine& engine, int64_t step = 1) {
  const double loss = run_micro_batches(engine, step, 4);
  engine.end_of_step();
  return loss;
}

class LoraDropout : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Models, LoraDropout, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

// Along the gradient g the loss rises by |g| h. The central difference leaves out h^3; a loss of 4 in
// f32, whose terms are summed in double, is exact to 1e-6.
TEST_P(LoraDropout, GradientsAreTheDerivative) {
  EngineSpec spec = spec_of(GetParam());
  spec.model.top_k = spec.model.num_experts;  // a choice of experts would be a step of the loss
  Engine engine(spec);
  const std::vector<float> start = drawn(engine);
  run_micro_batches(engine, 1, 4);
  const std::vector<float> g = all_elements(engine, true);
  engine.end_of_step();
  double norm = 0;
  for (const float x : g) norm += double{x} * x;
  norm = std::sqrt(norm);
  ASSERT_GT(norm, 1e-3);
  constexpr double kStep = 4e-3;
  const auto at = [&](double h) {
    std::vector<float> moved = start;
    for (size_t i = 0; i < g.size(); ++i) moved[i] += static_cast<float>(h * g[i] / norm);
    set_elements(engine, moved);
    return loss_of(engine);
  };
  EXPECT_NEAR((at(kStep) - at(-kStep)) / (2 * kStep), norm, 5e-3 * norm + 5e-4);
}

TEST_P(LoraDropout, RecomputeAndMicroBatchesKeepTheDraws) {
  EngineSpec spec = spec_of(GetParam());
  Engine whole(spec);
  spec.recompute.layer = true;
  Engine again(spec);
  spec.recompute = {};
  spec.shape.batch = 4, spec.shape.max_segments = 36;
  Engine one_batch(spec);
  drawn(whole), drawn(again), drawn(one_batch);
  const double loss = run_micro_batches(whole, 3, 4);
  EXPECT_EQ(run_micro_batches(again, 3, 4), loss);
  EXPECT_EQ(all_elements(again, true), all_elements(whole, true));
  EXPECT_NEAR(run_micro_batches(one_batch, 3, 4), loss, 1e-6 * loss);
  EXPECT_LT(relative_l2(all_elements(one_batch, true), all_elements(whole, true)), 1e-5);
}

TEST_P(LoraDropout, DrawsForEachStepAndIsOffInEvaluation) {
  Engine dropped(spec_of(GetParam())), plain(spec_of(GetParam(), 0));
  drawn(dropped), drawn(plain);
  const auto with_step = [](Engine& engine, int64_t step, bool training) {
    fill_random(engine.batch(), engine.spec().model, 1, 0, 2);
    engine.batch().scalars.set_step(step);
    engine.batch().training = training;
    engine.forward();
    const double loss = engine.loss();
    engine.end_of_step();
    return loss;
  };
  EXPECT_EQ(with_step(dropped, 1, true), with_step(dropped, 1, true));
  EXPECT_NE(with_step(dropped, 1, true), with_step(dropped, 2, true));
  EXPECT_NE(with_step(dropped, 1, true), with_step(plain, 1, true));
  EXPECT_EQ(with_step(dropped, 1, false), with_step(plain, 1, false));
}

}  // namespace
}  // namespace moebius

#include "parallel/optim/optimizer.h"

#include <optional>

#include "io/testing.h"
#include "parallel/optim/grad_norm.h"
#include "parallel/optim/param_groups.h"
#include "parallel/sharding/sharding.h"

namespace moebius {
namespace {

TEST(ParamGroups, MatricesDecayAndVectorsDoNot) {
  const std::vector<ParamGroup> groups = param_groups({.weight_decay = 0.25});
  using enum ParamKind;
  for (const ParamKind kind : {matrix, embedding, head, experts, router})
    EXPECT_EQ(group_of(groups, kind).weight_decay, 0.25);
  for (const ParamKind kind : {norm, bias, sink}) EXPECT_EQ(group_of(groups, kind).weight_decay, 0);
  expect_error(ErrorKind::internal, "does not hold", [&] { group_of(groups, state); });
}

// A matrix, a bias, a frozen matrix and state, with their optimizer.
struct Rig {
  explicit Rig(const OptimizerSpec& spec = {.weight_decay = 0.5}) {
    params.declare({.name = "matrix", .shape = {2, 2}});
    params.declare({.name = "bias", .shape = {2}, .kind = ParamKind::bias});
    params.declare({.name = "frozen", .shape = {2}});
    params.declare({.name = "load", .shape = {2}, .kind = ParamKind::state, .trainable = false});
    sharding = make_sharding(params, mesh, plan);
    norm.emplace(params, mesh, plan, spec.clip);
    optimizer =
        make_optimizer({.spec = spec, .params = params, .plan = plan, .mesh = &mesh, .sharding = sharding.get()});
    plan.bind(DeviceKind::cpu, 1 << 16);
    for (const Param& p : params.all())
      for (int64_t i = 0; i < p.w.numel(); ++i) p.w.ptr<float>()[i] = 1;
  }
  void update(double lr) {
    norm->measure(s, plan.stack());
    optimizer->update(s, plan.stack(), {.scale_1 = norm->scale(), .train_step = 1, .lr = lr});
  }
  const float* w(size_t i) const { return params.all()[i].w.ptr<float>(); }

  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
  Mesh mesh{MeshShape{}};
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::training, {"frozen"}};
  std::unique_ptr<Sharding> sharding;
  std::optional<GradNorm> norm;
  std::unique_ptr<Optimizer> optimizer;
};

// Without gradients a step only decays: w = w - lr * weight_decay * w.
TEST(Optimizer, DecaysByKindAndLeavesTheRestAlone) {
  Rig rig;
  rig.update(/*lr=*/0.5);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rig.w(0)[i], 0.75f);
  for (size_t p : {1, 2, 3})
    for (int i = 0; i < 2; ++i) EXPECT_EQ(rig.w(p)[i], 1.0f) << rig.params.all()[p].spec.name;
  EXPECT_EQ(*rig.norm->norm().ptr<float>(), 0.0f);
}

TEST(Optimizer, NamesItsState) {
  Rig rig;
  rig.params.all()[1].dw.ptr<float>()[0] = 3;
  rig.update(/*lr=*/0.5);
  std::vector<std::string> names;
  for (const OptimizerState& each : rig.optimizer->state()) {
    names.push_back(std::string(each.prefix) + each.param->spec.name);
    EXPECT_TRUE(is_optimizer_state(names.back()));
    EXPECT_EQ(each.values.numel(), each.param->owned.count);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"adam_m.matrix", "adam_v.matrix", "adam_m.bias", "adam_v.bias"}));
  EXPECT_GT(rig.optimizer->state()[2].values.ptr<float>()[0], 0);
  EXPECT_EQ(rig.optimizer->state()[0].values.ptr<float>()[0], 0);
  for (const char* name : {"model.norm.weight", "adam", "m.adam_m."}) EXPECT_FALSE(is_optimizer_state(name)) << name;
}

// w = w - lr (weight_decay w + m), m = momentum m + g.
TEST(Sgd, UpdatesWithMomentumAndNamesItsState) {
  Rig rig({.kind = OptimizerKind::sgd, .weight_decay = 0.5, .momentum = 0.5, .clip = 0});
  rig.params.all()[0].dw.ptr<float>()[0] = 1;
  rig.update(/*lr=*/0.5);
  EXPECT_EQ(rig.w(0)[0], 0.25f);  // 1 - 0.5 (0.5 + 1)
  EXPECT_EQ(rig.w(0)[1], 0.75f);
  EXPECT_EQ(rig.w(1)[0], 1.0f);
  rig.update(/*lr=*/0.5);
  EXPECT_EQ(rig.w(0)[0], -0.5625f);  // 0.25 - 0.5 (0.125 + 1.5)
  std::vector<std::string> names;
  for (const OptimizerState& each : rig.optimizer->state()) {
    names.push_back(std::string(each.prefix) + each.param->spec.name);
    EXPECT_TRUE(is_optimizer_state(names.back()));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"sgd_m.matrix", "sgd_m.bias"}));
  EXPECT_EQ(rig.optimizer->state()[0].values.ptr<float>()[0], 1.5f);
}

TEST(Sgd, WithoutMomentumThereIsNoState) {
  const OptimizerSpec spec{.kind = OptimizerKind::sgd, .weight_decay = 0, .momentum = 0, .clip = 0};
  EXPECT_EQ(num_moments(spec), 0);
  Rig rig(spec);
  rig.params.all()[0].dw.ptr<float>()[0] = 1;
  rig.update(/*lr=*/0.5);
  EXPECT_EQ(rig.w(0)[0], 0.5f);
  EXPECT_TRUE(rig.optimizer->state().empty());
  EXPECT_EQ(rig.plan.bytes(Life::optimizer), 0);
}

}  // namespace
}  // namespace moebius

// Frozen parameters have no gradient and no optimizer state, and training does not change their
// bits. All other parameters are trained as if nothing were frozen.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>

#include "io/json_text.h"
#include "io/testing.h"
#include "tests/equivalence/tiny.h"
#include "train/state.h"

namespace moebius {
namespace {

using namespace testing;
using ::testing::Combine;
using ::testing::TestWithParam;
using ::testing::Values;
using Patterns = std::vector<std::string>;

EngineSpec frozen_spec(const Patterns& freeze, DType compute, const ModelSpec& model = tiny_model()) {
  EngineSpec spec = tiny_engine(model, 2, compute, 2);
  spec.freeze = freeze;
  return spec;
}

std::vector<char> bytes_of(const Tensor& t) {
  const char* data = static_cast<const char*>(t.data);
  return {data, data + t.num_bytes()};
}

// Compares an engine in which everything that matches is frozen with one in which nothing is.
void expect_others_have_the_same_gradients(const EngineSpec& some_spec) {
  EngineSpec all_spec = some_spec;
  all_spec.freeze.clear();
  Engine all(all_spec), some(some_spec);
  for (Engine* engine : {&all, &some}) {
    init_params(*engine);
    fill_random(engine->batch(), engine->spec().model, 1, 0, 2);
    engine->forward_backward();
  }
  auto with = all.model().params().all().begin();
  int64_t frozen = 0, compared = 0;
  for (const Param& p : some.model().params().all()) {
    const Param& q = *with++;
    EXPECT_EQ(bytes_of(p.w), bytes_of(q.w)) << p.spec.name;
    EXPECT_EQ(p.frozen, q.has_grad && matches_any(some_spec.freeze, p.spec.parts[0].name)) << p.spec.name;
    EXPECT_EQ(p.has_grad, q.has_grad && !p.frozen) << p.spec.name;
    frozen += p.frozen;
    if (!p.has_grad) continue;
    EXPECT_EQ(bytes_of(p.dw), bytes_of(q.dw)) << p.spec.name;
    ++compared;
  }
  EXPECT_GT(frozen, 0);
  EXPECT_GT(compared, 0);
}

// Five layers of one kind.
ModelSpec deep_model() {
  ModelSpec model = tiny_model();
  model.num_layers = 5;
  model.moe_layers.assign(5, true);
  return model;
}

// Layers below the lowest trained parameter share what they save, and move none of it to the host.
TEST(Frozen, LayersBelowTheLowestTrainedOneKeepNothing) {
  const auto spec_of = [](int64_t frozen_layers, const OffloadSpec& offload) {
    Patterns freeze;
    if (frozen_layers > 0) freeze.push_back("model.embed_tokens.*");
    for (int64_t i = 0; i < frozen_layers; ++i) freeze.push_back(fmt::format("model.layers.{}.*", i));
    EngineSpec spec = frozen_spec(freeze, DType::f32, deep_model());
    spec.offload = offload;
    return spec;
  };
  const auto bytes = [&](Life life, int64_t frozen_layers, const OffloadSpec& offload) {
    EngineSpec spec = spec_of(frozen_layers, offload);
    spec.device = DeviceKind::null;
    return Engine(spec).plan().bytes(life);
  };
  OffloadSpec all;
  all.tensors.layer = true;
  const int64_t saved = bytes(Life::saved, 1, {}), host = bytes(Life::host, 0, all);
  const int64_t of_layer = saved - bytes(Life::saved, 2, {});
  EXPECT_GT(of_layer, 0);
  EXPECT_EQ(bytes(Life::saved, 4, {}), saved - 3 * of_layer);
  EXPECT_GT(host, 0);
  for (const int64_t n : {1, 2, 4}) EXPECT_EQ(5 * bytes(Life::host, n, all), (5 - n) * host) << n;
  OffloadSpec half = all;
  half.fraction = 0.5;
  EXPECT_EQ(5 * bytes(Life::host, 2, half), 2 * host) << "two of the three layers above";
  for (const OffloadSpec& offload : {OffloadSpec{}, all}) expect_others_have_the_same_gradients(spec_of(3, offload));
}

class Freeze : public TestWithParam<std::tuple<Patterns, DType>> {
 protected:
  static const Patterns& patterns() { return std::get<0>(GetParam()); }
  static DType compute() { return std::get<1>(GetParam()); }
};

TEST_P(Freeze, OthersHaveTheSameGradients) {
  expect_others_have_the_same_gradients(frozen_spec(patterns(), compute()));
}

TEST_P(Freeze, AreUnchangedWithoutMemoryForTraining) {
  Engine all(frozen_spec({}, compute())), engine(frozen_spec(patterns(), compute()));
  init_params(engine);
  int64_t frozen_elements = 0;
  std::map<std::string, std::vector<char>> before;
  for (const Param& p : engine.model().params().all()) {
    before[p.spec.name] = bytes_of(p.w);
    if (p.frozen) frozen_elements += p.w.numel();
  }
  train(engine, 3, 2);
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.init != ParamInit::normal || !(p.frozen || p.has_grad)) continue;
    EXPECT_EQ(bytes_of(p.w) == before[p.spec.name], p.frozen) << p.spec.name;
  }
  // Each tensor begins at a multiple of kAlign elements of the plan, which are f32.
  const int64_t slack = MemoryPlan::kAlign * size_of(DType::f32) * static_cast<int64_t>(before.size());
  const auto saved = [&](Life life) { return all.plan().bytes(life) - engine.plan().bytes(life); };
  EXPECT_NEAR(saved(Life::grad), 4 * frozen_elements, slack);
  EXPECT_NEAR(saved(Life::optimizer), 8 * frozen_elements, 2 * slack);
  EXPECT_NEAR(saved(Life::master), compute() == DType::bf16 ? 4 * frozen_elements : 0, slack);
}

TEST_P(Freeze, FrozenParametersAreSavedWithoutOptimizerState) {
  Engine engine(frozen_spec(patterns(), compute()));
  std::map<std::string, DType> saved;
  for (const NamedTensor& t : training_state(engine)) saved[t.name] = t.tensor.dtype;
  for (const Param& p : engine.model().params().all()) {
    for (const ParamPart& part : p.spec.parts) {
      ASSERT_TRUE(saved.contains(part.name)) << part.name;
      EXPECT_EQ(saved.contains("adam_m." + part.name), p.has_grad) << part.name;
      EXPECT_EQ(saved[part.name], p.frozen ? p.spec.dtype : DType::f32) << part.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Parts, Freeze,
                         Combine(Values(Patterns{"*.mlp.gate.*"}, Patterns{"*.mlp.experts.*"},
                                        Patterns{"model.embed_tokens.weight"}, Patterns{"lm_head.*"},
                                        Patterns{"*layernorm.weight", "*_norm.weight", "model.norm.*"},
                                        Patterns{"*.self_attn.*", "*.shared_expert*"},
                                        Patterns{"model.layers.*", "model.embed_tokens.*", "model.norm.weight"}),
                                 Values(DType::f32, DType::bf16)));

TEST(FreezeLatentAttention, OthersHaveTheSameGradients) {
  const std::string config = MOEBIUS_SOURCE_DIR "/tests/golden/data/deepseek_v3_v4_packed/config.json";
  const ModelSpec model = model_spec_from_hf(read_json(config), config);
  for (const Patterns& freeze :
       {Patterns{"*.kv_a_proj_with_mqa.*", "*_layernorm.weight"}, Patterns{"*.q_a_proj.*"}, Patterns{"*.self_attn.*"}})
    expect_others_have_the_same_gradients(frozen_spec(freeze, DType::f32, model));
}

TEST(FreezeErrors, NameTheWrongPattern) {
  const auto refused = [](const Patterns& freeze, const std::string& text) {
    expect_error(ErrorKind::usage, text, [&] { Engine engine(frozen_spec(freeze, DType::f32)); });
  };
  refused(
      {"*.mlp.gate.*", "model.embed_token.weight"},
      "\"model.embed_token.weight\" matches none, the nearest is model.embed_tokens.weight; correct it, or leave it out "
      "(moebius checkpoint ls MODEL lists the names)");
  refused({"*.q_proj.weight"},
          "expected patterns that match all parts of model.layers.0.self_attn.qkv_proj.weight or "
          "none; got some that match model.layers.0.self_attn.q_proj.weight and not");
  refused({"*"}, "expected to leave something to train");
  refused({"*.last_load"}, "matches none");
  refused({"*.mlp.expert.*"}, "\"*.mlp.expert.*\" matches none, the nearest is mlp.experts of model.layers.");
}

}  // namespace
}  // namespace moebius

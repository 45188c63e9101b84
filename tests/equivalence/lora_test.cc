// A model with adapters computes what the same model with W + scale * B A in place of W computes, and
// the gradients of A and B follow from that of W by the chain rule. All else stays as it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "io/testing.h"
#include "model/lora/adapter_params.h"
#include "model/lora/shared_a.h"
#include "tests/equivalence/tiny.h"
#include "train/state.h"

namespace moebius {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr int64_t kRank = 3;
const LoraSpec kEverywhere{.rank = kRank, .alpha = 4.5, .targets = {"*"}};

struct Case {
  const char* name;
  ModelSpec model;
  LoraSpec lora = kEverywhere;
  DType compute = DType::f32;
  bool recompute = false;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

ModelSpec gpt_oss_like() {
  ModelSpec m = tiny_model();
  m.qk_norm = QkNorm::none;
  m.qkv_bias = m.o_bias = m.attention_sinks = m.router_bias = m.expert_proj_bias = true;
  m.shared_intermediate_size = 0;
  m.shared_expert_gate = false;
  m.moe_layers = {true, true, true};
  m.swiglu_limit = 1.5;
  m.check();
  return m;
}

std::vector<Case> cases() {
  const auto some = [](std::vector<std::string> targets) {
    return LoraSpec{.rank = kRank, .alpha = 4.5, .targets = std::move(targets)};
  };
  return {{"everywhere", tiny_model()},
          {"recompute", tiny_model(), kEverywhere, DType::f32, true},
          {"latent", latent_model()},
          {"gpt_oss", gpt_oss_like()},
          {"q_and_v", tiny_model(), some({"q_proj", "v_proj"})},
          {"router", tiny_model(), some({"mlp.gate"})},
          {"router_of_gpt_oss", gpt_oss_like(), some({"mlp.gate"})},
          {"up_of_experts", tiny_model(), some({"mlp.experts.*.up_proj"})},
          {"down_of_experts", tiny_model(), some({"mlp.experts.*.down_proj"})},
          {"down_of_layer_0", tiny_model(), some({"model.layers.0.mlp.down_proj"})},
          {"shared_gate_proj", tiny_model(), some({"mlp.shared_experts.gate_proj"})},
          {"one_a_for_gate_and_up", tiny_model(), some({"mlp.experts.gate_up_proj", "mlp.experts.*.down_proj"})},
          {"one_a_of_gpt_oss", gpt_oss_like(), some({"self_attn.*", "mlp.experts.*.gate_up_proj"})},
          {"one_a_recomputed", tiny_model(), some({"gate_up_proj"}), DType::f32, true},
          {"bf16", tiny_model(), kEverywhere, DType::bf16}};
}

EngineSpec spec_of(const Case& c) {
  EngineSpec spec = tiny_engine(c.model, 2, c.compute, 2);
  spec.lora = c.lora;
  if (c.recompute) spec.recompute.layer = true;
  return spec;
}

// B begins at 0, which would hide errors: here it is drawn. Masters and weights.
void draw_b(Engine& engine) {
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.kind != ParamKind::adapter || p.spec.init != ParamInit::zeros) continue;
    const Rng rng(5, RngSite::bench, 0, key_of(p.spec.name.c_str()));
    for (int64_t i = 0; i < p.master().numel(); ++i) p.master().ptr<float>()[i] = 0.2f * rng.normal(i);
  }
  Stream s = engine.stream();
  engine.model().params().sync(s);
}

// The bias of a router begins at 0 too. Logits are x W + b, and then the adapter adds to them. Returns how many
// biases were drawn.
int64_t draw_router_biases(Engine& engine) {
  int64_t num_drawn = 0;
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.kind != ParamKind::bias || !p.spec.name.ends_with(".mlp.gate.bias")) continue;
    const Rng rng(6, RngSite::bench, 0, key_of(p.spec.name.c_str()));
    for (int64_t i = 0; i < p.master().numel(); ++i) p.master().ptr<float>()[i] = 0.5f * rng.normal(i);
    ++num_drawn;
  }
  Stream s = engine.stream();
  engine.model().params().sync(s);
  return num_drawn;
}

using Matrices = std::map<std::string, std::vector<float>>;

// Returns the parts of f32 parameters by name.
Matrices parts_of(Engine& engine, bool gradients) {
  Matrices all;
  for (const Param& p : engine.model().params().all()) {
    if (gradients && !p.has_grad) continue;
    for (const ParamPart& part : p.spec.parts) {
      const Tensor t = part_of(gradients ? p.dw : p.master(), part);
      if (t.dtype == DType::f32) all[part.name] = {t.ptr<float>(), t.ptr<float>() + t.numel()};
    }
  }
  return all;
}

// c [m, n] of a [m, k] and b [k, n], either as its transpose
std::vector<float> product(const std::vector<float>& a, bool trans_a, const std::vector<float>& b, bool trans_b,
                           int64_t k, float scale) {
  const int64_t m = std::ssize(a) / k, n = std::ssize(b) / k;
  std::vector<float> c(m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < k; ++p)
        sum += double{a[trans_a ? p * m + i : i * k + p]} * b[trans_b ? j * k + p : p * n + j];
      c[i * n + j] = static_cast<float>(scale * sum);
    }
  }
  return c;
}

// Returns the A of a matrix, which may be that of gate_up_proj.
const std::vector<float>& a_of(const Matrices& adapters, const std::string& matrix) {
  const auto own = adapters.find(matrix + kLoraA);
  return own == adapters.end() ? adapters.at(matrix_of_shared_a(matrix) + kLoraA) : own->second;
}

// The matrices that an A belongs to: itself, or gate_proj and up_proj.
std::vector<std::string> matrices_of_a(const std::string& matrix) {
  const size_t at = matrix.find("gate_up_proj");
  if (at == matrix.npos) return {matrix};
  return {matrix.substr(0, at) + "gate_proj", matrix.substr(0, at) + "up_proj"};
}

class Lora : public ::testing::TestWithParam<Case> {};

TEST_P(Lora, EqualsTheMergedModelAndItsGradients) {
  const Case c = GetParam();
  Engine adapted(spec_of(c));
  EngineSpec merged_spec = spec_of(c);
  merged_spec.lora = {};
  Engine merged(merged_spec);
  init_params(adapted);
  init_params(merged);
  draw_b(adapted);
  const int64_t num_biases = c.model.router_bias ? c.model.num_layers : 0;  // each layer of such a model has a router
  EXPECT_EQ(draw_router_biases(adapted), num_biases);
  EXPECT_EQ(draw_router_biases(merged), num_biases);
  const Matrices adapters = parts_of(adapted, /*gradients=*/false);
  int64_t num_merged = 0;
  for (const Param& p : merged.model().params().all()) {
    for (const ParamPart& part : p.spec.parts) {
      const std::string matrix = part.name.substr(0, part.name.rfind(".weight"));
      if (!adapters.contains(matrix + kLoraB)) continue;
      const std::vector<float> add =
          product(adapters.at(matrix + kLoraB), false, a_of(adapters, matrix), false, kRank, c.lora.scale());
      for (size_t i = 0; i < add.size(); ++i) part_of(p.master(), part).ptr<float>()[i] += add[i];
      ++num_merged;
    }
  }
  Stream s = merged.stream();
  merged.model().params().sync(s);
  EXPECT_EQ(num_merged, std::count_if(adapters.begin(), adapters.end(),
                                      [](const auto& each) { return each.first.ends_with(kLoraB); }));
  EXPECT_GT(num_merged, 0);

  // Sums of about 50 products, three layers deep, in another order.
  constexpr double kBound = 3e-5;
  const double of_adapted = run_micro_batches(adapted, 1, 4), of_merged = run_micro_batches(merged, 1, 4);
  if (c.compute == DType::bf16) {  // rounds the merged weights, which moves choices of experts
    EXPECT_NEAR(of_adapted, of_merged, 0.03 * of_merged);
    return;
  }
  EXPECT_NEAR(of_adapted, of_merged, 1e-5);
  const Matrices dw = parts_of(merged, true), got = parts_of(adapted, true);
  for (const auto& [name, gradient] : got) {
    const std::string matrix = adapted_matrix(name);
    std::vector<float> want;
    if (name.ends_with(kLoraB)) {
      const std::vector<float>& a = a_of(adapters, matrix);
      want = product(dw.at(matrix + ".weight"), false, a, true, std::ssize(a) / kRank, c.lora.scale());
    } else {
      want.resize(gradient.size());
      for (const std::string& each : matrices_of_a(matrix)) {
        const std::vector<float>& b = adapters.at(each + kLoraB);
        const std::vector<float> term =
            product(b, true, dw.at(each + ".weight"), false, std::ssize(b) / kRank, c.lora.scale());
        for (size_t i = 0; i < want.size(); ++i) want[i] += term[i];
      }
    }
    double norm = 0;
    for (const float x : want) norm += double{x} * x;
    if (norm == 0) {
      EXPECT_EQ(gradient, want) << name;  // of an expert without tokens
    } else {
      EXPECT_LT(relative_l2(gradient, want), kBound) << name;
    }
  }
}

TEST_P(Lora, OnlyAdaptersAreTrainedAndHaveMemoryForIt) {
  const Case c = GetParam();
  Engine engine(spec_of(c));
  EngineSpec plain = spec_of(c);
  plain.lora = {};
  Engine all(plain);
  init_params(engine);
  std::map<std::string, std::vector<char>> before;
  const auto bytes_of = [](const Tensor& t) {
    const char* data = static_cast<const char*>(t.data);
    return std::vector<char>(data, data + t.num_bytes());
  };
  int64_t trained = 0;
  for (const Param& p : engine.model().params().all()) {
    before[p.spec.name] = bytes_of(p.w);
    EXPECT_EQ(p.has_grad, p.spec.kind == ParamKind::adapter) << p.spec.name;
    if (p.has_grad) trained += p.w.numel();
  }
  EXPECT_EQ(engine.model().whole_catalog().num_trained(), trained);
  EXPECT_LT(trained, all.model().whole_catalog().num_trained());
  train(engine, 3, 2);
  for (const Param& p : engine.model().params().all()) {
    if (!p.has_grad && !p.frozen) continue;  // state of routers
    EXPECT_EQ(bytes_of(p.w) == before[p.spec.name], p.frozen) << p.spec.name;
  }
  const int64_t slack = 512 * static_cast<int64_t>(before.size());
  EXPECT_NEAR(engine.plan().bytes(Life::grad), 4 * trained, slack);
  EXPECT_NEAR(engine.plan().bytes(Life::optimizer), 8 * trained, 2 * slack);
  EXPECT_NEAR(engine.plan().bytes(Life::master), c.compute == DType::bf16 ? 4 * trained : 0, slack);
}

// A checkpoint has the adapters and what the optimizer knows of them.
TEST_P(Lora, CheckpointsHoldOnlyAdaptersAndTheirMoments) {
  Engine engine(spec_of(GetParam()));
  int64_t adapters = 0;
  for (const NamedTensor& t : training_state(engine)) {
    const bool is_of_router = t.name.ends_with(".last_load") || t.name.ends_with(".e_score_correction_bias");
    EXPECT_TRUE(is_of_router || t.name.find(".lora_") != std::string::npos) << t.name;
    adapters += !is_of_router;
  }
  EXPECT_GT(adapters, 0);
  EXPECT_EQ(adapters % 6, 0) << "A and B, each with two moments";
}

INSTANTIATE_TEST_SUITE_P(Models, Lora, ::testing::ValuesIn(cases()), [](const auto& info) { return info.param.name; });

// Without a step the model is the base: B is zero.
TEST(LoraStart, IsTheBaseModelBitForBit) {
  for (const DType compute : {DType::f32, DType::bf16}) {
    EngineSpec spec = tiny_engine(tiny_model(), 2, compute, 2);
    Engine base(spec);
    spec.lora = {.rank = 4, .alpha = 8, .targets = {"self_attn.*", "mlp.gate"}};
    Engine adapted(spec);
    init_params(base);
    init_params(adapted);
    EXPECT_EQ(run_micro_batches(base, 1, 4), run_micro_batches(adapted, 1, 4));
  }
}

// Adapters are added to quantised products, and are never quantised themselves.
TEST(LoraStart, IsTheQuantisedBaseModelBitForBit) {
  EngineSpec spec = tiny_engine(tiny_model(), 2, DType::bf16, 2);
  spec.precision.recipe = PrecisionRecipe::fp8_block;
  Engine base(spec);
  spec.lora = {.rank = 4, .alpha = 8, .targets = {"*"}};
  Engine adapted(spec);
  init_params(base);
  init_params(adapted);
  const double loss = run_micro_batches(base, 1, 4);
  EXPECT_EQ(run_micro_batches(adapted, 1, 4), loss);
  spec.precision.recipe = PrecisionRecipe::none;
  Engine plain(spec);
  init_params(plain);
  EXPECT_NE(run_micro_batches(plain, 1, 4), loss);
}

// PEFT draws A uniformly within 1 / sqrt(in).
TEST(LoraStart, DrawsAWithinItsBound) {
  EngineSpec spec = tiny_engine(tiny_model(), 2, DType::f32, 1);
  spec.lora = {.rank = 64, .targets = {"q_proj"}};
  Engine engine(spec);
  init_params(engine);
  const float bound = 1.0f / std::sqrt(24.0f);
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.kind != ParamKind::adapter) continue;
    const bool is_a = p.spec.init == ParamInit::uniform;
    double sum = 0, squares = 0;
    float most = 0;
    for (int64_t i = 0; i < p.w.numel(); ++i) {
      const float x = p.w.ptr<float>()[i];
      sum += x, squares += double{x} * x, most = std::max(most, std::abs(x));
    }
    const auto n = static_cast<double>(p.w.numel());
    EXPECT_LE(most, is_a ? 1.00001f * bound : 0.0f) << p.spec.name;
    if (!is_a) continue;
    EXPECT_GT(most, 0.99f * bound);
    EXPECT_NEAR(sum / n, 0, 4 * bound / std::sqrt(3 * n));
    EXPECT_NEAR(squares / n, bound * bound / 3, 0.1 * bound * bound);
  }
}

TEST(LoraTargets, ThatMatchNothingAreNamed) {
  const auto error = [](std::vector<std::string> targets, const ModelSpec& model = tiny_model()) {
    EngineSpec spec = tiny_engine(model, 2, DType::f32, 1);
    spec.lora = {.rank = 2, .targets = std::move(targets)};
    spec.device = DeviceKind::null;
    try {
      Engine engine(spec);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(error({"q_proj", "query"}).find("lora.targets: expected patterns"), 0u);
  EXPECT_THAT(error({"q_proj", "query"}),
              HasSubstr("\"query\" matches none that can have an adapter, the nearest is "));
  EXPECT_THAT(error({"embed_tokens"}), HasSubstr("\"embed_tokens\" matches none that can have an adapter"));
  EXPECT_THAT(error({"shared_expert_gate"}), HasSubstr("matches none"));
  EXPECT_THAT(error({"mlp.experts.3.up_proj"}),
              HasSubstr("a projection of all experts of a layer or of none; got some that match "
                        "model.layers.1.mlp.experts.3.up_proj and not model.layers.1.mlp.experts."));
  EXPECT_EQ(error({"model.layers.1.mlp.experts.*", "kv_a_proj_with_mqa"}, latent_model()), "");
  EXPECT_EQ(error({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}), "");
  EXPECT_THAT(
      error({"mlp.experts.*", "mlp.experts.gate_up_proj"}),
      HasSubstr("\"mlp.experts.gate_up_proj\" gives gate_proj and up_proj of an expert one A for both, and another "
                "pattern gives one of the two its own"));
  EXPECT_THAT(
      error({"mlp.gate.weight"}),
      HasSubstr("without .weight; \"mlp.gate.weight\" matches none that can have an adapter, the nearest is mlp.gate "
                "of model.layers."));
}

}  // namespace
}  // namespace moebius

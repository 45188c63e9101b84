// Whole training with masters as remainders of bf16 weights, and with sums of gradients in bf16.
#include <gtest/gtest.h>

#include <array>
#include <bit>

#include "tests/equivalence/tiny.h"

namespace moebius {
namespace {

using namespace testing;

// So small that a run of 50 steps can do without a master halfway between two bf16 numbers.
ModelSpec small_model() {
  ModelSpec m;
  m.vocab_size = 13;
  m.hidden_size = 8;
  m.num_layers = 1;
  m.num_heads = 2;
  m.num_kv_heads = 1;
  m.head_dim = 4;
  m.max_position_embeddings = 16;
  m.initializer_range = 0.3;
  m.moe_layers = {true};
  m.num_experts = 3;
  m.top_k = 2;
  m.moe_intermediate_size = 4;
  m.check();
  return m;
}

struct Trained {
  std::vector<std::vector<float>> masters;  // after each step
  std::vector<double> objectives;
  int64_t ties = 0;  // masters of bf16 weights halfway between two bf16 numbers
};

Trained trained(MasterFormat format, uint64_t seed) {
  EngineSpec spec = tiny_engine(small_model(), 2, DType::bf16, 2);
  spec.optimizer->master = format;
  spec.seed = seed;
  Engine engine(spec);
  Stream s = engine.stream();
  const ParamTable& params = engine.model().params();
  init_params(engine);
  Trained all;
  for (int64_t step = 1; step <= 50; ++step) {
    all.objectives.push_back(run_micro_batches(engine, step, 2));
    EngineTestAccess::optimizer_step(engine, step, 1e-2);
    engine.end_of_step();
    all.masters.push_back(all_elements(engine, false));
    for (const Param& p : params.all()) {
      if (!p.has_grad || p.w.dtype != DType::bf16) continue;
      if (p.has_remainder) {
        std::vector<float> masters(static_cast<size_t>(p.owned.count));
        read_masters(s, p, 0, masters);
        for (const float x : masters) all.ties += (std::bit_cast<uint32_t>(x) & 0xffffu) == 0x8000u;
        continue;
      }
      const Tensor master = p.master();
      for (int64_t i = 0; i < master.numel(); ++i)
        all.ties += (std::bit_cast<uint32_t>(master.ptr<float>()[i]) & 0xffffu) == 0x8000u;
    }
  }
  return all;
}

// Halfway between two bf16 numbers a remainder has the other of the two weights, and from then on
// the runs are as two roundings of one run. The first seed of these whose run never meets such a
// master must have the bits of f32 masters.
TEST(OptimizerFormats, RemaindersTrainAsF32MastersDo) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const Trained f32 = trained(MasterFormat::f32, seed);
    if (f32.ties > 0) continue;
    const Trained remainder = trained(MasterFormat::bf16_remainder, seed);
    EXPECT_EQ(remainder.masters, f32.masters);
    EXPECT_EQ(remainder.objectives, f32.objectives);
    EXPECT_NE(f32.masters.front(), f32.masters.back());
    return;
  }
  FAIL() << "every seed has a master halfway between two bf16 numbers";
}

// The gradients of each micro-batch by itself, f32, are rounded into the sum one after the other. What is not in a
// layer, and the router's f32 gate, have sums in f32.
void expect_sums_of_micro_batches(bool fuse, const std::vector<std::string>& freeze = {},
                                  const PrecisionSpec& precision = {}) {
  SCOPED_TRACE(fuse ? "by the products" : "by a pass");
  EngineSpec spec = tiny_engine(tiny_model(), 2, DType::bf16, 2);
  spec.freeze = freeze;
  spec.precision = precision;
  Engine wide(spec);
  spec.optimizer->grad = GradFormat::bf16;
  spec.optimizer->fuse_grad = fuse;
  Engine half(spec);
  init_params(wide);
  init_params(half);
  const auto params = [](Engine& e) -> const std::deque<Param>& { return e.model().params().all(); };
  const size_t num_params = params(wide).size();
  std::vector<std::vector<float>> expected(num_params);
  for (int step = 1; step <= 2; ++step) {
    for (int64_t m = 0; m < 3; ++m) {
      fill_random(wide.batch(), spec.model, step, 2 * m, 6);
      wide.forward_backward();
      fill_random(half.batch(), spec.model, step, 2 * m, 6);
      half.forward_backward();
      for (size_t i = 0; i < num_params; ++i) {
        const Param& p = params(wide)[i];
        if (!params(half)[i].sums_apart()) continue;
        expected[i].resize(static_cast<size_t>(p.dw.numel()));
        for (int64_t j = 0; j < p.dw.numel(); ++j) {
          const float x = p.dw.ptr<float>()[j];
          expected[i][j] = to_f32(to_bf16(m == 0 ? x : expected[i][j] + x));
        }
      }
      wide.end_of_step();
    }
    int64_t num_half = 0;
    for (size_t i = 0; i < num_params; ++i) {
      const Param& p = params(half)[i];
      if (!p.has_grad) continue;
      EXPECT_EQ(p.sums_apart(), p.spec.name.starts_with("model.layers.") && p.w.dtype == DType::bf16) << p.spec.name;
      EXPECT_EQ(p.fuses_grad(), fuse && p.spec.kind == ParamKind::experts) << p.spec.name;
      if (!p.sums_apart()) continue;
      ++num_half;
      int64_t different = 0;
      for (int64_t j = 0; j < p.w.numel(); ++j) different += to_f32(p.grad().ptr<bf16>()[j]) != expected[i][j];
      EXPECT_EQ(different, 0) << p.spec.name << " step " << step;
    }
    EXPECT_GT(num_half, 10);
    half.end_of_step();
  }
}

TEST(OptimizerFormats, SumsInBf16AreThoseOfTheMicroBatches) {
  for (const bool fuse : {false, true}) expect_sums_of_micro_batches(fuse);
}

TEST(OptimizerFormats, SumsInBf16AreThoseOfTheMicroBatchesInEightBits) {
  for (const bool fuse : {false, true}) {
    expect_sums_of_micro_batches(
        fuse, {}, {.recipe = PrecisionRecipe::fp8_block, .weight_gradients = WeightGradientPrecision::compute});
  }
}

// Layers share the memory of f32 gradients. What is frozen in one of them moves its other gradients to addresses where
// the other layers leave different ones. Ops add to the gradients of norms, so these must begin at 0 all the same.
TEST(OptimizerFormats, SumsInBf16AreThoseOfTheMicroBatchesWhereLayersDiffer) {
  for (const bool fuse : {false, true}) expect_sums_of_micro_batches(fuse, {"model.layers.1.input_layernorm.weight"});
}

// Layers take turns with the memory of f32 gradients.
TEST(OptimizerFormats, SumsInBf16TakeHalfOfTheMemory) {
  const auto plan = [](GradFormat grad, bool offload) {
    EngineSpec spec = tiny_engine(tiny_model(), 2, DType::bf16, 1);
    spec.optimizer->grad = grad;
    spec.optimizer->offload_grad = offload;
    const Engine engine(spec);
    int64_t in_layers = 0;
    for (const Param& p : engine.model().params().all()) in_layers += p.sums_apart() ? p.w.numel() : 0;
    return std::array{engine.plan().bytes(Life::grad), engine.plan().bytes(Life::layer_grad),
                      engine.plan().bytes(Life::host), in_layers};
  };
  const auto wide = plan(GradFormat::f32, false), half = plan(GradFormat::bf16, false),
             away = plan(GradFormat::bf16, true);
  EXPECT_EQ(wide[1], 0);
  const int64_t slack = 100 * MemoryPlan::kAlign * 4;  // of tensors that begin at a multiple
  EXPECT_NEAR(wide[0] - half[0], 2 * half[3], slack);
  EXPECT_LT(half[1], 4 * half[3] * 2 / 3);  // one of three layers
  EXPECT_GT(half[1], 4 * half[3] / 3);
  EXPECT_EQ(half[2], 0);
  EXPECT_NEAR(away[2], 2 * half[3], slack);
  EXPECT_NEAR(wide[0] - away[0], 4 * half[3], slack);
}

// Without chunks, experts that fuse have no f32 gradients. The plan of a GPU has scratch of one size for it.
TEST(OptimizerFormats, FusedSumsTakeNoF32GradientsOfExperts) {
  const auto plan = [](bool fuse) {
    EngineSpec spec = tiny_engine(tiny_model(), 2, DType::bf16, 1);
    spec.optimizer->grad = GradFormat::bf16;
    spec.optimizer->fuse_grad = fuse;
    const Engine engine(spec);
    int64_t of_experts = 0;
    for (const Param& p : engine.model().params().all())
      if (p.spec.kind == ParamKind::experts) of_experts += p.dw.num_bytes();
    return std::array{engine.plan().bytes(Life::grad), engine.plan().bytes(Life::layer_grad), of_experts};
  };
  const auto pass = plan(false), fused = plan(true);
  EXPECT_EQ(pass[0], fused[0]);
  EXPECT_LT(fused[1], pass[1]);
  EXPECT_GT(pass[2], 0);
  EXPECT_EQ(fused[2], 0);
}

TEST(OptimizerFormats, MemoryIsThatOfTheFormat) {
  const auto bytes = [](MasterFormat master, StateFormat state, Life life) {
    EngineSpec spec = tiny_engine(tiny_model(), 2, DType::bf16, 1);
    spec.optimizer->master = master;
    spec.optimizer->state = state;
    return Engine(spec).plan().bytes(life);
  };
  using enum MasterFormat;
  const int64_t masters = bytes(f32, StateFormat::f32, Life::master);
  EXPECT_GT(masters, 0);
  EXPECT_EQ(bytes(bf16_remainder, StateFormat::f32, Life::master), masters / 2);
  EXPECT_EQ(bytes(bf16_stochastic, StateFormat::f32, Life::master), 0);
  EXPECT_EQ(bytes(f32, StateFormat::bf16, Life::optimizer), bytes(f32, StateFormat::f32, Life::optimizer) / 2);
}

}  // namespace
}  // namespace moebius

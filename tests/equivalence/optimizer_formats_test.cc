// Whole training with masters as remainders beside bf16 weights.
#include <gtest/gtest.h>

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
    params.join_masters(s);
    all.masters.push_back(all_elements(engine, false));
    for (const Param& p : params.all()) {
      if (!p.has_grad || p.w.dtype != DType::bf16) continue;
      const Tensor master = p.master();
      for (int64_t i = 0; i < master.numel(); ++i)
        all.ties += (std::bit_cast<uint32_t>(master.ptr<float>()[i]) & 0xffffu) == 0x8000u;
    }
    params.clear_masters(s);
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

TEST(OptimizerFormats, TakeTheMemoryThatTheyName) {
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

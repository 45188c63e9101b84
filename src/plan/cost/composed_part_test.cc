#include "plan/cost/composed_part.h"

#include <gtest/gtest.h>

#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

constexpr PredictOptions kComposed{.simulate = false, .memory = PredictOptions::Memory::none},
    kWhole{.simulate = false, .composes = false, .memory = PredictOptions::Memory::none};

// Every pair of a cp exchange and a layout of experts costs the time of its own parts. cp and ep are 4 on 4 ranks,
// or as in `set` on others.
void expect_adds_up(const char* name, const std::vector<std::string>& set, int64_t ranks = 4) {
  PartLibrary composed, whole;
  for (const char* exchange : {"\"allgather\"", "\"ring\"", "\"alltoall\"", "\"hierarchical\""}) {
    for (const char* dispatcher : {"\"allgather\"", "\"alltoall\"", "\"direct\""}) {
      std::vector<std::string> keys{
          "parallel.cp=4",       "parallel.ep=4",   "parallel.cp_comm=" + std::string(exchange),
          "run.device=\"cuda\"", "run.graph=false", "parallel.dispatcher=" + std::string(dispatcher)};
      if (exchange == std::string("\"hierarchical\"")) keys.emplace_back("parallel.cp_inner=2");
      keys.insert(keys.end(), set.begin(), set.end());
      const RunSpec run = recipe(name, keys);
      const Prediction of_parts = predict(composed, run, ranks, machine("h200"), {}, kComposed),
                       direct = predict(whole, run, ranks, machine("h200"), {}, kWhole);
      EXPECT_NEAR(of_parts.step_s, direct.step_s, 1e-9 * direct.step_s) << exchange << " " << dispatcher;
      EXPECT_EQ(of_parts.messages, direct.messages);
      ASSERT_EQ(of_parts.axes.size(), direct.axes.size());
      for (const auto& [axis, time] : direct.axes)
        EXPECT_NEAR(of_parts.axes.at(axis).bytes, time.bytes, 1e-9 * time.bytes) << axis;
    }
  }
  EXPECT_LT(composed.num_runs(), whole.num_runs());
}

TEST(ComposedPart, SumOfPartsEqualsTheWholePart) {
  expect_adds_up("bench_olmoe_1b_7b.toml", {"train.global_batch=4"});
  expect_adds_up("bench_olmoe_1b_7b.toml", {"train.global_batch=4", "memory.recompute=[\"qkv\", \"expert_up\"]",
                                            "precision.recipe=\"fp8_block\""});
}

// Groups of cp and ep that are not the same ranks.
TEST(ComposedPart, SumEqualsTheWholeWithUnequalCpAndEpGroups) {
  for (const std::vector<std::string>& degrees :
       std::vector<std::vector<std::string>>{{"parallel.cp=4", "parallel.ep=2"},
                                             {"parallel.tp=2", "parallel.cp=4", "parallel.ep=2"},
                                             {"parallel.tp=2", "parallel.cp=4", "parallel.etp=2", "parallel.ep=2"}}) {
    std::vector<std::string> set = degrees;
    set.emplace_back("train.global_batch=8");
    expect_adds_up("bench_olmoe_1b_7b.toml", set, 8);
  }
}

// Layers of both kinds, latent attention, and a module of multi-token prediction.
TEST(ComposedPart, SumEqualsTheWholeForDeepSeek) {
  expect_adds_up("deepseek_v3.toml",
                 {"model.num_hidden_layers=5", "train.seq_len=4096", "train.micro_batch=1", "train.global_batch=4",
                  "parallel.tp=1", "parallel.pp=1", "parallel.layout=\"\""});
}

TEST(ComposedPart, IsNotSplitWithoutContextParallelism) {
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"parallel.ep=4", "train.global_batch=16"});
  const EngineSpec spec = planned_engine_spec(run, 4);
  EXPECT_FALSE(has_simpler_parts(spec, {.num_layers = 1}));
}

}  // namespace
}  // namespace moebius

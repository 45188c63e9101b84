// Copies between a GPU and its host, and the memory that recompute frees, compared with runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/recipe/memory_keys.h"
#include "plan/memory/chosen_memory.h"
#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// Activations go to the host in forward passes and come back in backward passes, and weights only come from it. Each is
// faster than an update, which moves states both ways at once. docs/measurements/memory.md has these steps of one H200.
TEST(PlansOfOffload, CopiesInOneDirectionTakeAsLongAsMeasured) {
  PartLibrary parts;
  const auto step_s = [&](const std::vector<std::string>& set) {
    return predict(parts, recipe("bench_qwen3_30b_a3b_8layers.toml", set), 1, machine("h200"), {}).step_s;
  };
  EXPECT_NEAR(step_s({"memory.offload=[\"layer\"]"}), 2.314, 0.05 * 2.314);
  EXPECT_NEAR(step_s({"train.micro_batch=4", "optimizer.master=bf16_stochastic", "optimizer.state=8bit",
                      "checkpoint.async=false", "optimizer.offload=true", "optimizer.offload_buffer=0",
                      "memory.offload=[\"weights\"]"}),
              3.768, 0.05 * 3.768);
}

TEST(PlansOfOffload, CopiesInOneDirectionAreAsFastAsOthersWithoutTheirRate) {
  PlanMachine m = machine("h200");
  EXPECT_EQ(m.one_way_link(), 55e9);
  m.link_one_way_gb_s = 0;
  EXPECT_EQ(m.one_way_link(), 45e9);
}

// A merged pass sends the activations of one micro-batch to the host while it brings back those of another. Of four
// micro-batches, the passes of three are merged.
TEST(PlansOfOffload, CopiesOfMergedPassesGoBothWaysAtOnce) {
  PartLibrary parts;
  const auto seconds = [&](double both_ways, double one_way, const char* overlap) {
    PlanMachine m = machine("h100");
    m.link_gb_s = both_ways;
    m.link_one_way_gb_s = one_way;
    const RunSpec run = recipe("bench_qwen3_30b_a3b_8layers.toml",
                               {"memory.offload=[\"layer_input\"]", "train.micro_batch=1", "train.global_batch=4"});
    return predict(parts, run, 1, m, parse_assumptions({"system=megatron", overlap})).phases.at("host link");
  };
  const double slow = seconds(0.1, 0.1, "expert_overlap=merged"), fast = seconds(0.2, 0.2, "expert_overlap=merged");
  EXPECT_GT(slow, 1.5 * fast);
  EXPECT_NEAR(seconds(0.1, 0.2, "expert_overlap=merged"), 0.75 * slow + 0.25 * fast, 1e-9 * slow);
  EXPECT_EQ(seconds(0.1, 0.2, "expert_overlap=none"), seconds(0.2, 0.2, "expert_overlap=none"));
}

// With a budget of rows the experts' tensors are in a pool and not among the saved ones.
TEST(PlansOfMegatron, RecomputedLayersFreeNoMoreThanThereIs) {
  PartLibrary parts;
  const auto memory = [&](std::vector<std::string> assume) {
    const RunSpec run =
        recipe("bench_olmoe_1b_7b.toml", {"parallel.pp=2", "parallel.ep=4", "memory.recompute=[\"norm\"]",
                                          "memory.expert_rows=1.25", "parallel.dispatcher=direct"});
    return predict(parts, run, 8, machine("h100"), parse_assumptions(assume)).fullest_rank();
  };
  const RankMemory all = memory({"system=megatron", "recompute=moe"}), none = memory({"system=megatron"});
  for (const int64_t bytes : all.life) EXPECT_GE(bytes, 0);
  EXPECT_GT(none.of(Life::rows), 0);
  EXPECT_LT(all.of(Life::rows), none.of(Life::rows));
  EXPECT_LT(all.total(), none.total());
}

// A layout that a search finds for Megatron Core in memory.fit fits by its keys too: its stages share one peak, and
// those of Moebius need more.
TEST(PlansOfMegatron, FitTheMemoryThatASearchFits) {
  PartLibrary parts;
  const Assumptions megatron = parse_assumptions({"system=megatron"});
  const PlanMachine m = machine("h100");
  const std::string layer = "memory.recompute=[\"layer\"]";
  const auto chosen = [&](std::vector<std::string> set, const Assumptions& assume) {
    for (const char* key : {"parallel.pp=4", "parallel.vpp=4", "parallel.dispatcher=auto", "train.global_batch=64"})
      set.emplace_back(key);
    return choose_memory(parts, recipe("bench_olmoe_1b_7b.toml", set), 4, m, assume);
  };
  const int64_t bytes = predict(parts, chosen({layer}, megatron).run, 4, m, megatron).fullest_rank().total();
  const std::string fit = "memory.fit=" + exact_bytes_text(bytes), less = "memory.fit=" + exact_bytes_text(bytes - 1);
  EXPECT_NO_THROW(chosen({layer, fit}, megatron));
  EXPECT_THAT(refused([&] { chosen({layer, fit}, {}); }), testing::HasSubstr("a rank needs "));
  EXPECT_THAT(refused([&] { chosen({layer, less}, megatron); }), testing::HasSubstr("a rank of Megatron Core needs "));
  EXPECT_THAT(refused([&] {
                chosen({fit, "memory.recompute=auto"}, megatron);
              }),
              testing::HasSubstr("memory.recompute = \"auto\" chooses for the memory of Moebius"));
}

}  // namespace
}  // namespace moebius

// The search with weights on the host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plan/predict.h"
#include "plan/search.h"
#include "plan/search_space.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::Contains;
using testing::Each;

// Several ranks of a stage can have weights on the host only with fsdp, so the search tries no other choice.
TEST(SearchWeightsOnHost, ShardsThemInEveryLayout) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  const char *name = "bench_olmoe_1b_7b.toml", *offload = "memory.offload=[\"weights\"]";
  const auto found = [&](const std::vector<std::string>& set) {
    return search(parts, recipe(name, set), 4, m, {}, {.keep = 3});
  };
  const SearchResult chosen = found({offload}), named = found({offload, "parallel.fsdp=true"});
  for (const FoundLayout& l : chosen.layouts) EXPECT_THAT(l.set, Contains("parallel.fsdp=true"));
  EXPECT_LE(chosen.layouts.at(0).prediction.step_s, named.layouts.at(0).prediction.step_s);
  std::vector<std::string> keys = chosen.layouts[0].set;
  keys.emplace_back(offload);
  const Prediction best = predict(parts, recipe(name, keys), 4, m, {});
  EXPECT_EQ(best.step_s, chosen.layouts[0].prediction.step_s);
  // More ranks than layers: each stage has several.
  EXPECT_GT(search(parts, recipe(name, {offload, "model.num_hidden_layers=2"}), 4, m, {}, {.keep = 1}).layouts.size(),
            0U);
}

TEST(SearchWeightsOnHost, ChoicesOfShardingHaveFsdp) {
  const SearchLimits limits;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"memory.offload=[\"weights\"]"});
  const auto choices = [&](const RunSpec& of, int64_t ranks) {
    return sharding_choices(of, ranks, PrecisionRecipe::none, limits);
  };
  EXPECT_EQ(choices(run, 1).size(), 4U);
  ASSERT_EQ(choices(run, 2).size(), 2U);
  EXPECT_THAT(choices(run, 2), Each(testing::Field(&ShardingChoice::fsdp, true)));
  // So it is with a base in few bits.
  RunSpec few_bits = run;
  few_bits.init_from = "some/folder";
  few_bits.lora = {.rank = 4, .targets = {"*"}, .base = LoraBase::fp8_block};
  EXPECT_EQ(choices(few_bits, 2).size(), 2U);
}

}  // namespace
}  // namespace moebius

// Keys of a layout that --set or --sweep names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "plan/search.h"
#include "plan/sweep.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::Contains;
using testing::Each;
using testing::HasSubstr;

constexpr const char* kOlmoe = "bench_olmoe_1b_7b.toml";

std::set<std::string> values_of(const RunSpec& run, const char* key) {
  std::set<std::string> values;
  for (const auto& group : search_space(run, 8, {.max_direct_ranks = 8, .named = named_layout(run)}))
    for (const Candidate& c : group)
      for (const std::string& text : keys_of(run, c))
        if (text.starts_with(std::string(key) + "=")) values.insert(text.substr(text.find('=') + 1));
  return values;
}

// Each key keeps the value that is named, also one that the search does not try by itself, and the others vary.
TEST(NamedLayouts, KeepTheirValues) {
  const std::vector<std::pair<const char*, const char*>> named{
      {"parallel.tp", "2"},  {"parallel.pp", "2"},        {"parallel.ep", "4"},
      {"parallel.etp", "2"}, {"train.micro_batch", "32"}, {"parallel.dispatcher", "\"alltoall\""}};
  for (const auto& [key, value] : named) {
    const RunSpec run = recipe(kOlmoe, {std::string(key) + "=" + value, "train.global_batch=256"});
    EXPECT_EQ(values_of(run, key), std::set<std::string>{value}) << key;
    for (const auto& [other, ignored] : named) {
      if (std::string(other) == key) continue;
      EXPECT_GT(values_of(run, other).size(), 1U) << key << " leaves " << other;
    }
  }
  // No search tries this by itself on a GPU.
  const RunSpec two_level = recipe(kOlmoe, {"parallel.dispatcher=two_level", "parallel.ranks_per_node=2",
                                            "parallel.ep=4", "train.global_batch=256"});
  EXPECT_EQ(values_of(two_level, "parallel.dispatcher"), std::set<std::string>{"\"two_level\""});
  const RunSpec stages = recipe(kOlmoe, {"parallel.pp=2", "parallel.vpp=1", "parallel.layout=\"E t*7 | t*9 L\""});
  EXPECT_EQ(values_of(stages, "parallel.layout"), std::set<std::string>{"\"E t*7 | t*9 L\""});
}

// The layout of a recipe itself is no limit.
TEST(NamedLayouts, ComeFromSetOptionsOnly) {
  const RunSpec run = recipe("deepseek_v3_1024_h100.toml");
  EXPECT_NE(run.parallel.tp * run.parallel.pp, 1);
  EXPECT_EQ(named_layout(run).text(), "");
  EXPECT_EQ(named_layout(recipe(kOlmoe, {"parallel.ep=4", "train.micro_batch=2"})).text(),
            "parallel.ep = 4, train.micro_batch = 2");
}

TEST(NamedLayouts, AreKeptByASearch) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  const RunSpec run = recipe(kOlmoe, {"parallel.ep=2", "memory.recompute=[\"norm\"]", "model.num_hidden_layers=4"});
  const SearchResult found = search(parts, run, 4, m, {}, {.keep = 3});
  for (const FoundLayout& l : found.layouts) {
    EXPECT_EQ(l.prediction.mesh.ep, 2);
    EXPECT_THAT(l.set, Contains("memory.recompute=[\"norm\"]"));
  }
  EXPECT_THAT(search_text(found), HasSubstr("kept, as --set says: parallel.ep = 2, memory.recompute\n"));
  EXPECT_THAT(refused([&] { search(parts, recipe(kOlmoe, {"parallel.ep=5"}), 4, m, {}, {}); }),
              HasSubstr("--set keeps parallel.ep = 5: leave some of it out"));
}

// The points of a sweep with a search differ in the swept keys.
TEST(NamedLayouts, SweptLayoutKeysAreKept) {
  PartLibrary parts;
  const SweepBase base{.recipe = kRecipes + kOlmoe,
                       .overrides = {"model.num_hidden_layers=4"},
                       .ranks = 4,
                       .search = SearchOptions{.keep = 1}};
  const Sweep s = sweep(parts, base, {parse_sweep("parallel.ep=1,4")}, machine("h200"), {});
  EXPECT_EQ(s.points.at(0).prediction->mesh.ep, 1);
  EXPECT_EQ(s.points.at(1).prediction->mesh.ep, 4);
}

// A degree that no layout can have is refused by its own equation.
TEST(NamedLayouts, ErrorsGiveTheFailedEquation) {
  PartLibrary parts;
  const auto refusal = [&](const char* set, const char* also = "optimizer.lr=0.001") {
    return refused([&] { search(parts, recipe("bench_olmoe_1b_7b.toml", {set, also}), 8, machine("h200"), {}, {}); });
  };
  EXPECT_THAT(
      refusal("parallel.ep=3"),
      HasSubstr("if all other degrees are 1: parallel: edp: 8 must be divisible by 3; --set keeps parallel.ep = 3"));
  for (const char* set : {"parallel.ep=3", "parallel.tp=16"})
    EXPECT_THAT(refusal(set), testing::Not(HasSubstr("train.global_batch"))) << set;
  // The search chooses pp and cp, so it does not blame pp = 1 or cp = 1.
  for (const char* set : {"parallel.vpp=3", "parallel.cp_inner=2"})
    EXPECT_THAT(refusal(set, "train.micro_batch=3"), HasSubstr("must be a multiple of micro_batch * dp")) << set;
}

// The error says which key leaves no layout: the batch is not the reason.
TEST(NamedLayouts, NamesTheReasonForNoLayout) {
  PartLibrary parts;
  const auto refusal = [&](const std::vector<std::string>& set, int64_t ranks) {
    return refused([&] { search(parts, recipe("moe_one_gpu.toml", set), ranks, machine("h100"), {}, {}); });
  };
  EXPECT_THAT(refusal({"parallel.dispatcher=alltoall", "run.graph=false"}, 1),
              HasSubstr("only layouts with other values of the keys that --set names are valid; --set keeps "
                        "parallel.dispatcher = \"alltoall\": leave some of it out"));
  EXPECT_THAT(refusal({"train.global_batch=5"}, 13),
              HasSubstr("train.global_batch = 5 must be a multiple of micro_batch * dp"));
  EXPECT_THAT(refusal({"optimizer.name=muon", "optimizer.grad=bf16"}, 2),
              HasSubstr("the first that was tried is refused: optimizer.name = \"muon\" makes its updates in"));
}

}  // namespace
}  // namespace moebius

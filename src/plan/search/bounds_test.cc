// The bounds by which a search leaves layouts out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "plan/search/memory_fitting.h"
#include "plan/search/passes_bound.h"
#include "plan/search/products_bound.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// The products of a step take at most as long as the step, in every kind of layout.
TEST(SearchBounds, BoundsAStepByItsProducts) {
  PartLibrary parts;
  const PlanMachine m = machine("h100");
  int64_t tried = 0, near = 0;
  for (const PrecisionRecipe recipe_name : {PrecisionRecipe::none, PrecisionRecipe::fp8_block}) {
    RunSpec run = run_on(recipe("bench_olmoe_1b_7b.toml", {"model.num_hidden_layers=4"}), m);
    for (const auto& group : search_space(run, 4, {.max_tp = 4, .max_direct_ranks = 8, .recipes = {recipe_name}})) {
      const Candidate& c = group.front();
      const double bound_s = products_seconds({run, m, {}, 4}, c);
      double step_s = 0;
      try {
        step_s = predict(parts, run_of(run, c), 4, m, {}, {.simulate = false}).step_s;
      } catch (const Error&) {
        continue;  // the checks of a run refuse it
      }
      EXPECT_GT(bound_s, 0);
      EXPECT_LE(bound_s, step_s) << testing::PrintToString(keys_of(run, c));
      ++tried;
      near += bound_s > 0.5 * step_s;
    }
  }
  EXPECT_GT(tried, 20);
  EXPECT_GT(near, 0);  // the bound is not trivial
  const RunSpec frozen = recipe("bench_olmoe_1b_7b.toml", {"train.freeze=[\"embed_tokens\"]"});
  EXPECT_EQ(products_seconds({frozen, m, {}, 4}, Candidate{}), 0);
}

// Attention of long sequences takes most of a step, in every method of cp, and with a window it takes less.
TEST(SearchBounds, BoundsAStepByItsAttention) {
  PartLibrary parts;
  const PlanMachine m = machine("h100");
  std::set<CpComm> tried;
  double nearest = 0;
  for (const char* window : {"0", "1024"}) {
    const RunSpec run =
        run_on(recipe("bench_olmoe_1b_7b.toml",
                      {"model.num_hidden_layers=2", "model.max_position_embeddings=32768", "train.seq_len=32768",
                       "train.global_batch=1", "train.micro_batch=1", std::string("model.sliding_window=") + window}),
               m);
    for (const auto& group : search_space(run, 4, {.max_tp = 2, .max_direct_ranks = 8, .domain_ranks = 8})) {
      for (const Candidate& c : group) {
        if (c.micro_batch > 1 || c.parallel.etp > 1) continue;
        double step_s = 0;
        try {
          step_s = predict(parts, run_of(run, c), 4, m, {}, {.simulate = false}).step_s;
        } catch (const Error&) {
          continue;  // the checks of a run refuse it
        }
        const double bound_s = products_seconds({run, m, {}, 4}, c);
        EXPECT_LE(bound_s, step_s) << window << " " << testing::PrintToString(keys_of(run, c));
        if (std::string(window) == "0") nearest = std::max(nearest, bound_s / step_s);
        if (c.parallel.cp > 1) tried.insert(c.parallel.cp_comm);
      }
    }
  }
  EXPECT_GE(tried.size(), 3U);
  EXPECT_GT(nearest, 0.55);
}

// The passes of a step take at most as long as the step, also when their parts are composed.
TEST(SearchBounds, BoundsAStepByItsPasses) {
  PartLibrary parts;
  const PlanMachine m = machine("h100");
  for (const std::vector<std::string>& set : std::vector<std::vector<std::string>>{
           {"parallel.pp=2"},
           {"parallel.cp=2", "parallel.ep=2"},
           {"parallel.ep=4", "parallel.shard_gradients=true"},
           {"parallel.ep=2", "parallel.etp=2", "parallel.dispatcher=\"alltoall\"", "run.graph=false"},
           {"optimizer.offload=true", "checkpoint.async=false"}}) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", set);
    const double step_s = predict(parts, run, 4, m, {}, {.simulate = false}).step_s;
    for (const bool composes : {false, true}) {
      const double passes_s = passes_seconds(parts, run, 4, m, {}, {.composes = composes});
      EXPECT_LT(passes_s, step_s);
      EXPECT_GT(passes_s, 0.3 * step_s);
    }
  }
}

// A layout whose memory choices are all too slow is left out, and a layout that one of them makes fast enough is not.
TEST(SearchBounds, PruneLayoutsSlowWithEveryMemoryChoice) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  const RunSpec run = run_on(recipe("bench_olmoe_1b_7b.toml", {"train.global_batch=32"}), m);
  const SearchLimits limits{.max_tp = 2};
  const auto fitted = [&](const Candidate& c, double slowest_s, bool prunes) {
    return fit_memory_of(
        {.run = run,
         .limits = limits,
         .sharding = {{PrecisionRecipe::none, sharding_choices(run, 2, PrecisionRecipe::none, limits)}},
         .activations = activation_choices(run, limits),
         .timed = [&](const Candidate& with,
                      PredictOptions options) { return predict(parts, run_of(run, with), 2, m, {}, options); },
         .host_limit = [&](double) { return m.host_memory_of_rank(); },
         .bytes = 45e9,
         .slowest_s = slowest_s,
         .prunes = prunes},
        c);
  };
  int tried = 0;
  for (const auto& group : search_space(run, 2, limits)) {
    const Candidate& c = group.front();
    if (c.parallel.pp > 1 || c.micro_batch > 2 || c.parallel.dispatcher == DispatcherKind::alltoall) continue;
    const FittedMemory whole = fitted(c, std::numeric_limits<double>::infinity(), /*prunes=*/false);
    if (!whole.candidate || whole.candidate->memory == c.memory) continue;
    ++tried;
    const double found_s = whole.candidate->step_s;
    const FittedMemory fast = fitted(c, 1.05 * found_s, /*prunes=*/true);
    ASSERT_TRUE(fast.candidate) << testing::PrintToString(keys_of(run, c));
    EXPECT_EQ(fast.candidate->memory, whole.candidate->memory);
    const FittedMemory slow = fitted(c, 0.5 * found_s, /*prunes=*/true);
    EXPECT_TRUE(slow.is_slower && !slow.candidate);
    EXPECT_LT(slow.num_timed, whole.num_timed);
  }
  EXPECT_GT(tried, 2);
}

// The fullest rank need not be the same with each choice: states fill rank 0, and weights rank 1. With states on the
// host and weights in shards both ranks have room, so nothing is recomputed.
TEST(SearchBounds, AddMemoryRankByRank) {
  const PlanMachine m = machine("h200");
  const RunSpec run = run_on(recipe("bench_olmoe_1b_7b.toml"), m);
  const SearchLimits limits;
  const auto predicted = [](const Candidate& c, PredictOptions) {
    Prediction p;
    p.num_pp_ranks = 2;
    p.step_s = 1 + (c.memory.offload ? 0.2 : 0) + (c.memory.fsdp ? 0.1 : 0) + (c.memory.recompute.layer ? 0.5 : 0);
    for (const int64_t r : {0, 1}) {
      RankMemory rank{.pp_rank = r};
      rank.life[static_cast<size_t>(Life::param)] =
          (r == 0 ? 20 : 70) * int64_t{1'000'000'000} / (c.memory.fsdp ? 10 : 1);
      rank.life[static_cast<size_t>(c.memory.offload ? Life::host : Life::optimizer)] =
          (r == 0 ? 70 : 20) * int64_t{1'000'000'000};
      p.memory.push_back(rank);
      if (rank.total() > p.fullest_rank().total()) p.fullest = p.memory.size() - 1;
      p.host_bytes = std::max(p.host_bytes, static_cast<double>(rank.host_bytes()));
    }
    return p;
  };
  const FittedMemory fitted = fit_memory_of({.run = run,
                                             .limits = limits,
                                             .sharding = {{PrecisionRecipe::none, {{}, {.fsdp = true}}}},
                                             .activations = {run.memory.offload},
                                             .timed = predicted,
                                             .host_limit = [&](double) { return m.host_memory_of_rank(); },
                                             .bytes = 50e9},
                                            Candidate{});
  ASSERT_TRUE(fitted.candidate);
  const MemoryChoice& memory = fitted.candidate->memory;
  EXPECT_TRUE(memory.offload && memory.fsdp);
  EXPECT_FALSE(memory.recompute.layer);
  EXPECT_DOUBLE_EQ(fitted.candidate->step_s, 1.3);
}

}  // namespace
}  // namespace moebius

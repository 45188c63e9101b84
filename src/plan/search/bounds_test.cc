// The bounds that let a search leave layouts out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

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
  EXPECT_GT(near, 0);  // the bound says something
  const RunSpec frozen = recipe("bench_olmoe_1b_7b.toml", {"train.freeze=[\"embed_tokens\"]"});
  EXPECT_EQ(products_seconds({frozen, m, {}, 4}, Candidate{}), 0);
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

// A layout whose memory choices are all too slow is left out, and none of those that one of them makes fast enough.
TEST(SearchBounds, LeaveOutWhatIsSlowInEveryPlace) {
  PartLibrary parts;
  const PlanMachine m = machine("h200");
  const RunSpec run = run_on(recipe("bench_olmoe_1b_7b.toml", {"train.global_batch=32"}), m);
  const SearchLimits limits{.max_tp = 2};
  const auto fitted = [&](const Candidate& c, double slowest_s, bool prunes) {
    return fit_memory_of(
        {.run = run,
         .limits = limits,
         .sharding = {{PrecisionRecipe::none, sharding_choices(run, PrecisionRecipe::none, limits)}},
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

}  // namespace
}  // namespace moebius

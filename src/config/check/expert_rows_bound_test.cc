#include "config/check/expert_rows_bound.h"

#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

// With 16 experts and top-2 a rank of ep gets at most ep times the even share.
RunSpec run_of(Sets sets) {
  sets.insert(sets.end(), {"model.num_experts=16", "train.global_batch=24"});
  return parse(sets);
}

TEST(ExpertRowsBound, TheDefaultBudgetIsNotUsedWhereItSavesLittle) {
  EXPECT_EQ(expert_rows_budget(run_of({"parallel.ep=2"})), 0);
  EXPECT_EQ(expert_rows_budget(run_of({"parallel.ep=4"})), 1.25);
  EXPECT_EQ(expert_rows_budget(run_of({})), 1.25) << "a rank has all experts, and no budget";
  EXPECT_FALSE(pools_expert_rows(run_of({})));
  EXPECT_FALSE(pools_expert_rows(run_of({"parallel.ep=2"})));
  EXPECT_TRUE(pools_expert_rows(run_of({"parallel.ep=4"})));
}

TEST(ExpertRowsBound, ABudgetThatARecipeNamesIsUsed) {
  EXPECT_EQ(expert_rows_budget(run_of({"parallel.ep=2", "memory.expert_rows=1.25"})), 1.25);
  EXPECT_EQ(expert_rows_budget(run_of({"parallel.ep=2", "memory.expert_rows=0.5"})), 0.5);
  EXPECT_EQ(expert_rows_budget(run_of({"parallel.ep=4", "memory.expert_rows=0"})), 0);
  EXPECT_TRUE(pools_expert_rows(run_of({"parallel.ep=2", "memory.expert_rows=1.25"})));
}

}  // namespace
}  // namespace moebius

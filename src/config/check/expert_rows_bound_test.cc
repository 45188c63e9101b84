#include "config/check/expert_rows_bound.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

RunSpec run_of(Sets sets) {
  sets.insert(sets.begin(), {"model.num_experts=16", "train.global_batch=24"});
  return parse(sets);
}
double budget_of(const Sets& sets) { return expert_rows_budget(run_of(sets)); }

// With F = 6 columns and D = 12, L layers have 2.5 F L + 2 (5 F + D) = 15 L + 84 elements for each row of the even
// share where ep is 2, and without a budget 4 F L + 2 (3 F + D) = 24 L + 60. That is 75.9 % at L = 12, and 74.2 % at
// L = 14.
TEST(ExpertRowsBound, AutomaticIsABudgetWhereItSavesAQuarter) {
  EXPECT_EQ(budget_of({"parallel.ep=2", "model.num_hidden_layers=12"}), 0);
  EXPECT_EQ(budget_of({"parallel.ep=2", "model.num_hidden_layers=14"}), 1.25);
  EXPECT_EQ(budget_of({"parallel.ep=4"}), 1.25) << "a rank may get four times the even share";
  EXPECT_EQ(budget_of({"parallel.etp=2"}), 0) << "a rank gets the even share at most";
  EXPECT_EQ(budget_of({}), 0) << "a rank has all experts";
  EXPECT_EQ(budget_of({"parallel.ep=2", "model.num_hidden_layers=14", "memory.recompute=[\"expert_up\"]"}), 1.25)
      << "it is the same for every recompute";
}

// A default that is written becomes the same as one that is not.
TEST(ExpertRowsBound, AutomaticIsTheDefault) {
  for (const Sets& sets : std::vector<Sets>{{"parallel.ep=2"}, {"parallel.ep=4"}}) {
    Sets written = sets;
    written.emplace_back("memory.expert_rows=auto");
    EXPECT_EQ(budget_of(written), budget_of(sets));
    const RunSpec run = run_of(sets);
    EXPECT_EQ(expert_rows_budget(read_back(run, false)), expert_rows_budget(run));
    EXPECT_EQ(expert_rows_budget(without_provenance(run)), expert_rows_budget(run));
  }
}

TEST(ExpertRowsBound, ANumberIsUsed) {
  EXPECT_EQ(budget_of({"parallel.ep=2", "memory.expert_rows=1.25"}), 1.25);
  EXPECT_EQ(budget_of({"parallel.ep=2", "memory.expert_rows=0.5"}), 0.5);
  EXPECT_EQ(budget_of({"parallel.ep=4", "memory.expert_rows=0"}), 0);
  EXPECT_TRUE(pools_expert_rows(run_of({"parallel.ep=2", "memory.expert_rows=1.25"})));
  EXPECT_FALSE(pools_expert_rows(run_of({"parallel.ep=2"})));
  EXPECT_TRUE(pools_expert_rows(run_of({"parallel.ep=4"})));
}

TEST(ExpertRowsBound, TheTextGivesTheAutomaticChoice) {
  EXPECT_EQ(
      expert_rows_text(run_of({"parallel.ep=2"})),
      "memory.expert_rows = \"auto\" is 0: with a budget of 1.25 the rows of experts need 98 % of the memory of the "
      "worst case; \"auto\" uses this budget if that is at most 75 %");
  EXPECT_THAT(expert_rows_text(run_of({"parallel.ep=4"})),
              testing::HasSubstr("is 1.25: with a budget of 1.25 the rows of experts need 57 %"));
  EXPECT_EQ(expert_rows_text(run_of({"parallel.ep=2", "memory.expert_rows=1"})), "");
  EXPECT_EQ(expert_rows_text(run_of({})), "");
}

}  // namespace
}  // namespace moebius

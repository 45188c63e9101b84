#include "train/notes/block_states_note.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moebius {
namespace {

using testing::HasSubstr;

RunSpec run_with(const std::string& recipe, const std::vector<std::string>& set) {
  RunSpec run = load_run_spec(std::string(MOEBIUS_SOURCE_DIR) + "/recipes/" + recipe, set);
  run.check(1);
  return run;
}

TEST(BlockStatesNote, WarnsIfNearlyAllMomentsStayInF32) {
  const auto note = block_states_note(run_with("demo.toml", {"optimizer.state=8bit"}));
  ASSERT_TRUE(note);
  EXPECT_TRUE(note->is_warning);
  EXPECT_THAT(note->text, HasSubstr("keeps moments of 100 % of the parameters in f32"));
  EXPECT_THAT(note->text, HasSubstr("the largest of them is model.embed_tokens.weight"));
  EXPECT_FALSE(block_states_note(run_with("demo.toml", {"optimizer.state=bf16"})));
  EXPECT_FALSE(block_states_note(run_with("demo.toml", {})));
}

// One matrix of three has other rows.
TEST(BlockStatesNote, CountsTheElementsOfMatricesWithoutBlocks) {
  const RunSpec run = run_with("moe_states.toml", {"optimizer.state=8bit", "model.moe_intermediate_size=192"});
  const auto note = block_states_note(run);
  ASSERT_TRUE(note);
  EXPECT_FALSE(note->is_warning);
  EXPECT_THAT(note->text, HasSubstr("; the largest of them is model.layers.0.mlp.experts.0.down_proj.weight"));
  const BlockStates states = block_states(run);
  EXPECT_EQ(states.trained, run.model.num_parameters());
  // Beside them only norms.
  const int64_t down = 8 * 16 * 192 * 512;
  EXPECT_GT(states.in_f32, down);
  EXPECT_LT(states.in_f32, down + 20'000);
}

TEST(BlockStatesNote, IsSilentWhereMatricesHaveWholeBlocks) {
  for (const char* recipe : {"moe_states.toml", "qwen3_30b_a3b_one_gpu.toml", "moe_one_gpu.toml"}) {
    const RunSpec run = run_with(recipe, {"optimizer.state=8bit"});
    EXPECT_FALSE(block_states_note(run)) << recipe;
    EXPECT_LT(block_states(run).share_in_f32(), 1e-3) << recipe;
  }
}

}  // namespace
}  // namespace moebius

#include "tests/cli/finetune.h"

namespace moebius {
namespace {

TEST_F(FineTune, LearnsTheCompletionsAndLeavesFrozenPartsAlone) {
  ASSERT_EQ(readme_.commands.size(), 4u);
  tune();
  EXPECT_LT(eval_loss("Tuned"), 0.6 * eval_loss(kModelFolder));
  for (const char* frozen : {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"})
    EXPECT_EQ(tensor("Tuned", frozen), tensor(kModelFolder, frozen)) << frozen;
  for (const char* trained : {"lm_head.weight", "model.layers.1.mlp.experts.2.up_proj.weight"})
    EXPECT_NE(tensor("Tuned", trained), tensor(kModelFolder, trained)) << trained;
  EXPECT_EQ(read_file(dir_.path("Tuned/tokenizer.json")), read_file(dir_.path("tokenizer/tokenizer.json")));
  EXPECT_EQ(HfFolder::open(dir_.path("Tuned")).names(), HfFolder::open(dir_.path(kModelFolder)).names());
}

TEST_F(FineTune, ResumesBitForBit) {
  prepare();
  const auto train_to = [&](const std::string& steps) {
    run_readme("train", {"--set", "optimizer.schedule=constant", "--set", "train.steps=" + steps});
  };
  train_to("4");
  train_to("9");
  run({"export", "runs/tuned", "parts"});
  std::filesystem::remove_all(dir_.path("runs/tuned"));
  train_to("9");
  run({"export", "runs/tuned", "whole"});
  for (const std::string& name : HfFolder::open(dir_.path("whole")).names())
    EXPECT_EQ(tensor("parts", name), tensor("whole", name)) << name;
}

}  // namespace
}  // namespace moebius

#include "tests/cli/finetune.h"

namespace moebius {
namespace {

TEST_F(FineTune, LearnsTheCompletionsAndKeepsFrozenParts) {
  ASSERT_EQ(guide_.commands.size(), 3u);
  tune();
  EXPECT_LT(eval_loss("Tuned"), 0.6 * eval_loss(kModelFolder));
  for (const char* frozen : {"model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.gate.weight"})
    EXPECT_EQ(tensor("Tuned", frozen), tensor(kModelFolder, frozen)) << frozen;
  for (const char* trained : {"lm_head.weight", "model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"})
    EXPECT_NE(tensor("Tuned", trained), tensor(kModelFolder, trained)) << trained;
  EXPECT_EQ(read_file(dir_.path("Tuned/tokenizer.json")), read_file(dir_.path("tokenizer/tokenizer.json")));
  EXPECT_EQ(HfFolder::open(dir_.path("Tuned")).names(), HfFolder::open(dir_.path(kModelFolder)).names());
}

// Two turns of the assistant, as apply_chat_template of transformers writes them.
TEST_F(FineTune, AcceptsTokenizedChats) {
  write_file_atomic(
      dir_.path("chats.jsonl"),
      R"({"input_ids": [523, 84, 82, 264, 198, 256, 68, 295, 385, 30, 524, 198, 523, 505, 284, 83, 432, 198, )"
      R"(256, 68, 337, 524, 198, 523, 84, 82, 264, 198, 474, 524, 198, 523, 505, 284, 83, 432, 198, 77, 385, )"
      R"(524, 198], "assistant_masks": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, )"
      R"(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]})"
      "\n");
  EXPECT_THAT(
      run({"data", "build", "--input", "chats.jsonl", "--tokenizer", kModelFolder, "--out", "runs/tuned/data/pairs"})
          .out,
      testing::HasSubstr("1 document, 41 tokens, 7 of them targets, 12 bytes of text"));
  EXPECT_THAT(run_guide("train").err,
              testing::HasSubstr("frozen parameters are held and saved in bf16 (precision.compute)"));
  EXPECT_LT(eval_loss("runs/tuned"), 0.5 * eval_loss(kModelFolder));
}

// Trained parts are saved in f32, and frozen parts in the compute dtype.
TEST_F(FineTune, IsExportedInOneDtype) {
  prepare();
  run_guide("train", {"--set", "train.steps=2"});
  EXPECT_THAT(
      run({"export", "runs/tuned", "out"}).err,  // gate, up and down of 4 experts in 2 layers
      testing::HasSubstr("tensors that the run froze and held in bf16 (24) are written in f32 like the others"));
  const HfFolder folder = HfFolder::open(dir_.path("out"));
  for (const std::string& name : folder.names()) EXPECT_EQ(folder.at(name).dtype, DType::f32) << name;
  EXPECT_EQ(nlohmann::json::parse(read_file(dir_.path("out/config.json"))).at("torch_dtype"), "float32");
  // After another conversion to bf16, the frozen parts have their original bits.
  run({"export", "out", "again", "--dtype", "bf16"});
  const std::string frozen = "model.layers.0.mlp.gate.weight";
  EXPECT_EQ(tensor("again", frozen), tensor(kModelFolder, frozen));
  // A model that was imported but not trained is exported as it is stored, in bf16.
  run({"import", kModelFolder, "imported"});
  EXPECT_EQ(run({"export", "imported", "as_stored"}).err.find("written in f32"), std::string::npos);
  EXPECT_EQ(tensor("as_stored", "lm_head.weight"), tensor(kModelFolder, "lm_head.weight"));
}

TEST_F(FineTune, ResumesBitForBit) {
  prepare();
  const auto train_to = [&](const std::string& steps) {
    run_guide("train", {"--set", "optimizer.schedule=constant", "--set", "train.steps=" + steps});
  };
  train_to("4");
  train_to("9");
  run({"export", "runs/tuned", "parts"});
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path("runs/tuned"))) {
    if (entry.path().filename() != "data") std::filesystem::remove_all(entry.path());
  }
  train_to("9");
  run({"export", "runs/tuned", "whole"});
  for (const std::string& name : HfFolder::open(dir_.path("whole")).names())
    EXPECT_EQ(tensor("parts", name), tensor("whole", name)) << name;
}

}  // namespace
}  // namespace moebius

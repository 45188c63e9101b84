#include "config/check/run_notes.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<std::string> notes(const Sets& set, int64_t num_ranks) {
  const RunSpec run = parse(set);
  run.check(num_ranks);
  std::vector<std::string> texts;
  for (const RunNote& note : run_notes(run, num_ranks))
    texts.push_back((note.is_warning ? "warning: " : "") + note.text);
  return texts;
}

TEST(RunNotes, OfLayersThatNoTwoRanksShare) {
  EXPECT_THAT(notes({}, 1), IsEmpty());
  EXPECT_THAT(notes({"parallel.fsdp=true"}, 2), IsEmpty());
  EXPECT_THAT(notes({"parallel.fsdp=true"}, 1),
              ElementsAre("warning: parallel.fsdp = true shards nothing: no two ranks hold the same weights of a layer "
                          "(dp * cp = 1, edp = 1); remove it, or use more ranks"));
  EXPECT_THAT(
      notes({"parallel.fsdp=true", "parallel.shard_gradients=true", "parallel.pp=2", "model.num_hidden_layers=4"}, 2),
      ElementsAre(HasSubstr("parallel.fsdp = true shards nothing"),
                  HasSubstr("parallel.shard_gradients = true shards nothing: no two ranks hold the same "
                            "gradients of a layer")));
}

TEST(RunNotes, NameParametersThatStayWhole) {
  EXPECT_THAT(notes({"parallel.fsdp=true", "parallel.ep=2"}, 2),
              ElementsAre("parallel.fsdp = true leaves weights of these whole on each rank, since no other rank holds "
                          "them: experts (edp = 1)"));
  EXPECT_THAT(notes({"parallel.shard_gradients=true", "parallel.tp=2", "model.num_key_value_heads=2", "train.seq_len=8",
                     "train.micro_batch=2"},
                    2),
              ElementsAre("parallel.shard_gradients = true leaves gradients of these whole on each rank, since no "
                          "other rank holds them: matrices of attention and of dense MLPs (dp * cp = 1)"));
  EXPECT_THAT(notes({"parallel.shard_gradients=true", "parallel.ep=2", "lora.rank=4", "lora.targets=[\"q_proj\"]"}, 2),
              IsEmpty())
      << "experts have no gradients";
  // A dense model has no experts.
  EXPECT_THAT(notes({"parallel.fsdp=true", "model.num_experts=0", "model.num_experts_per_tok=0",
                     "model.moe_intermediate_size=0", "model.intermediate_size=20"},
                    2),
              IsEmpty());
}

TEST(RunNotes, OfRowsOfExpertsThatOffloadLeavesOnTheDevice) {
  const std::string layer = "memory.offload=[\"layer\"]", ep = "parallel.ep=2";
  EXPECT_THAT(notes({layer}, 2), IsEmpty());
  EXPECT_THAT(notes({layer, ep, "memory.expert_rows=0"}, 2), IsEmpty());
  EXPECT_THAT(notes({layer, ep, "memory.expert_rows=2"}, 2), IsEmpty()) << "the budget reaches the worst case";
  EXPECT_THAT(notes({layer, ep, "memory.recompute=[\"expert_up\"]"}, 2), IsEmpty());
  EXPECT_THAT(notes({layer, ep}, 2), IsEmpty()) << "\"auto\" is 0 with few layers";
  EXPECT_THAT(notes({layer, ep, "memory.expert_rows=1.25"}, 2),
              ElementsAre("memory.offload \"layer\" leaves the rows of experts on the device: several ranks share the "
                          "experts, so their rows are in the pool of memory.expert_rows = 1.25; 0 plans and moves the "
                          "worst case"));
}

TEST(RunNotes, OfTheFactorOfYarn) {
  const std::string original = "original_max_position_embeddings=11";
  EXPECT_THAT(notes({"model.rope_scaling={rope_type=\"yarn\",factor=3.0," + original + "}", "train.seq_len=33"}, 1),
              IsEmpty());
  for (const char* key : {"rope_scaling", "rope_parameters"})
    EXPECT_THAT(notes({fmt::format("model.{}={{rope_type=\"yarn\",{}}}", key, original), "train.seq_len=33"}, 1),
                ElementsAre("model.rope_scaling has no factor, so YaRN takes max_position_embeddings / "
                            "original_max_position_embeddings = 33 / 11 = 3"));
  EXPECT_THAT(notes({"model.rope_scaling={rope_type=\"yarn\",factor=2.0," + original + "}", "train.seq_len=22"}, 1),
              IsEmpty());
  EXPECT_THAT(notes({"model.rope_scaling={rope_type=\"yarn\",factor=2.0," + original + "}", "train.seq_len=23"}, 1),
              ElementsAre("train.seq_len = 23 is longer than the 22 positions to which model.rope_scaling stretches "
                          "the model: factor * original_max_position_embeddings = 2 * 11"));
}

TEST(RunNotes, OfTheFactorOfYarnInAModelsFolder) {
  const ConfigFolder folder(
      "{\"model_type\": \"qwen3_moe\", \"max_position_embeddings\": 64, \"num_experts\": 4, \"rope_scaling\": "
      "{\"rope_type\": \"yarn\", \"original_max_position_embeddings\": 16}}");
  const RunSpec run = parse_run_spec(kRest, "r.toml", {"model.hf=" + folder.path()});
  ASSERT_EQ(run_notes(run, 1).size(), 1U);
  EXPECT_THAT(run_notes(run, 1)[0].text, HasSubstr("= 64 / 16 = 4"));
  EXPECT_THAT(run_notes(read_back(run, true), 1), IsEmpty()) << "the resolved recipe has the factor";
}

TEST(RunNotes, OfAWindowThatTheFamilyDoesNotRead) {
  const Sets window{"model.model_type=qwen3_moe", "model.sliding_window=9"};
  const auto notes = [&](Sets more) {
    more.insert(more.begin(), window.begin(), window.end());
    return run_notes(parse(more), 1);
  };
  ASSERT_EQ(notes({}).size(), 1U);
  EXPECT_TRUE(notes({})[0].is_warning);
  EXPECT_EQ(notes({})[0].text,
            "model.sliding_window has no effect: no layer of this \"qwen3_moe\" has a window; set "
            "model.use_sliding_window = true, or remove model.sliding_window");
  const RunSpec full = parse({"model.model_type=qwen2_moe", "model.sliding_window=9", "model.use_sliding_window=true",
                              "model.layer_types=[\"full_attention\", \"full_attention\", \"full_attention\"]"});
  ASSERT_EQ(run_notes(full, 1).size(), 1U);
  EXPECT_THAT(run_notes(full, 1)[0].text,
              HasSubstr("has a window; set model.use_sliding_window = true (model.max_window_layers or "
                        "model.layer_types say in which layers), or remove model.sliding_window"));
  EXPECT_THAT(notes({"model.use_sliding_window=true"}), IsEmpty());
  EXPECT_THAT(run_notes(read_back(parse(window), true), 1), IsEmpty()) << "the resolved recipe has no window";
  EXPECT_THAT(run_notes(parse({"model.sliding_window=9"}), 1), IsEmpty()) << "\"moebius\" reads it";
}

// `train` refuses it when it reads the recipe, not when it has begun to build the model.
TEST(RunNotes, RowsOfExpertsThatCannotMoveAreRefused) {
  const std::string rows = "memory.offload=[\"expert_up\"]", ep = "parallel.ep=2";
  EXPECT_NO_THROW(parse({rows}).check(2));
  EXPECT_NO_THROW(parse({rows, ep, "memory.expert_rows=0"}).check(2));
  EXPECT_NO_THROW(parse({rows, ep}).check(2)) << "\"auto\" is 0 with few layers";
  EXPECT_THAT(check_error({rows, ep, "memory.expert_rows=1.25"}, 2),
              HasSubstr("memory.offload \"expert_up\" cannot move the rows of experts that several ranks share: they "
                        "are in the pool of memory.expert_rows, on the device; remove the name, or set "
                        "memory.expert_rows = 0, which plans and moves the worst case [--set]"));
}

}  // namespace
}  // namespace moebius

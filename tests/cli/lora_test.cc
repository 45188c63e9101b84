// Adapters from the command line: train, resume, and what is refused.
#include "checkpoint/manifest.h"
#include "tests/built.h"
#include "tests/cli/lora_run.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST_F(LoraRun, TrainsAdaptersOfAnUnchangedModel) {
  run_guide("train", with_adapters());
  EXPECT_LT(eval_loss("runs/tuned"), 0.95 * eval_loss(kModelFolder));
  run({"export", "runs/tuned", "merged"});
  EXPECT_NEAR(eval_loss("merged"), eval_loss("runs/tuned"), 1e-4);
  EXPECT_EQ(HfFolder::open(dir_.path("merged")).names(), HfFolder::open(dir_.path(kModelFolder)).names());
  run({"export", "runs/tuned", "merged_bf16", "--dtype", "bf16"});
  for (const char* base : {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"})
    EXPECT_EQ(tensor("merged_bf16", base), tensor(kModelFolder, base)) << base;
  for (const char* adapted : {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.2.down_proj.weight"})
    EXPECT_NE(tensor("merged_bf16", adapted), tensor(kModelFolder, adapted)) << adapted;

  run({"export", "runs/tuned", "Adapter", "--adapter"});
  expect_refused(
      run_moebius(dir_, {"generate", "Adapter", "--prompt", "x"}), 3,
      "got only an adapter of PEFT; give its model and --adapter Adapter to eval, generate and chat, or merge both "
      "with moebius import MODEL CHECKPOINT --adapter Adapter");
  const nlohmann::json config = nlohmann::json::parse(read_file(dir_.path("Adapter/adapter_config.json")));
  EXPECT_EQ(config.at("peft_type"), "LORA");
  EXPECT_EQ(config.at("r"), 4);
  EXPECT_EQ(config.at("lora_alpha"), 8);
  EXPECT_THAT(config.at("target_modules").get<std::string>(),
              HasSubstr("model\\.layers\\.\\d+\\.mlp\\.experts\\.(\\d+\\.)?up_proj"));
  const SafetensorsFile file = adapter("Adapter");
  EXPECT_EQ(file.entries().size(), 2u * 2 * (4 + 1 + 4 * 3));  // layers, A and B: attention, router, experts
  EXPECT_EQ(file.at("base_model.model.model.layers.1.mlp.experts.3.down_proj.lora_A.weight").shape,
            (std::vector<int64_t>{4, 24}));

  // A run that begins with the adapter is where this one ended.
  run_guide("train", with_adapters({"run.dir=again", "lora.init_from=Adapter", "train.steps=1", "optimizer.lr=1e-30"}));
  EXPECT_NEAR(eval_loss("again"), eval_loss("runs/tuned"), 1e-4);
}

// Masters begin with the adapter that a run is given, in each of their formats.
TEST_F(LoraRun, StartsFromTheMastersOfAnAdapter) {
  run_guide("train", with_adapters({"train.steps=3"}));
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  for (const std::string master : {"f32", "bf16_remainder"}) {
    run_guide("train", with_adapters({"run.dir=" + master, "lora.init_from=Adapter", "train.steps=1",
                                      "optimizer.lr=1e-30", "precision.compute=bf16", "optimizer.master=" + master}));
    run({"export", master, master + "_adapter", "--adapter"});
    expect_same_adapters(master + "_adapter", "Adapter");
  }
}

// With a remainder each rank draws its own masters, and the weights of other owners in bf16.
TEST_F(LoraRun, OfTwoRanksWithShardedGradientsHasTheLossesOfWholeOnes) {
  std::vector<double> losses;
  for (const std::string sharded : {"false", "true"}) {
    const std::string folder = "sharded_" + sharded;
    std::vector<std::string> words =
        with_adapters({"run.dir=" + folder, "train.steps=3", "precision.compute=bf16",
                       "optimizer.master=bf16_remainder", "parallel.shard_gradients=" + sharded});
    words.insert(words.end(), {"--ranks", "2"});
    run_guide("train", words);
    losses.push_back(eval_loss(folder));
  }
  EXPECT_EQ(losses[0], losses[1]);
}

TEST_F(LoraRun, ResumesBitForBit) {
  const auto train_to = [&](const std::string& steps, const std::string& dir) {
    run_guide("train", with_adapters({"optimizer.schedule=constant", "lora.dropout=0.1", "train.steps=" + steps,
                                      "run.dir=" + dir}));
  };
  train_to("4", "parts");
  train_to("9", "parts");
  train_to("9", "whole");
  run({"export", "parts", "parts_adapter", "--adapter"});
  run({"export", "whole", "whole_adapter", "--adapter"});
  expect_same_adapters("parts_adapter", "whole_adapter");
}

// A run whose base is replaced: by the same weights in other files, and then by another model of the same shapes.
class LoraOnAnotherBase : public LoraRun {
 protected:
  void SetUp() override {
    LoraRun::SetUp();
    run({"train", "base.toml", "--set", "run.dir=other", "--set", "run.seed=5"});
    run({"export", "other", "Other", "--dtype", "bf16", "--files", "tokenizer"});
    train({"train.steps=2"});
  }
  Ran train(const std::vector<std::string>& sets) { return run_guide("train", with_adapters(sets)); }
  // Makes the base of the run a copy of another folder.
  void replace_base(const std::string& folder) {
    std::filesystem::remove_all(dir_.path(kModelFolder));
    std::filesystem::copy(dir_.path(folder), dir_.path(kModelFolder));
  }
};

TEST_F(LoraOnAnotherBase, TheRunDoesNotResume) {
  run({"export", kModelFolder, "Copy", "--files", "tokenizer", "--shard-bytes", "20000"});
  EXPECT_TRUE(std::filesystem::exists(dir_.path("Copy/model.safetensors.index.json")));
  replace_base("Copy");
  EXPECT_THAT(train({"train.steps=3"}).err, HasSubstr("resumed from"));
  std::vector<std::string> on_two = with_adapters({"train.steps=4", "parallel.ep=2"});
  on_two.insert(on_two.end(), {"--ranks", "2"});
  EXPECT_THAT(run_guide("train", on_two).err, HasSubstr("resumed from"));

  run({"export", kModelFolder, "Wide", "--dtype", "f32", "--files", "tokenizer"});
  replace_base("Wide");
  expect_training_refused({"train.steps=6"}, 2, "are not those that the adapters in runs/tuned were trained on");
  replace_base("Other");
  for (const char* text :
       {"resume: the weights in model.init_from = \"Qwen3-30B-A3B\" are not those that the adapters in runs/tuned were "
        "trained on; the checkpoint's fingerprint is\n  ",
        "\nbring them back; or train the adapters further on these weights in another run.dir, with lora.init_from = "
        "\"runs/tuned\"; or start over here with checkpoint.resume=false"})
    expect_training_refused({"train.steps=6"}, 2, text);
  EXPECT_THAT(
      train({"train.steps=1", "run.dir=further", "lora.init_from=runs/tuned"}).err,
      HasSubstr("warning: lora.init_from = \"runs/tuned\": its adapters were trained on other weights than those "
                "in model.init_from = \"Qwen3-30B-A3B\", and are trained further on these"));
  replace_base("Copy");
  const Ran ran = train({"train.steps=1", "run.dir=same", "lora.init_from=runs/tuned"});
  EXPECT_THAT(ran.err, Not(HasSubstr("other weights")));
}

// An adapter knows its base: in the form of PEFT, and as a run.
TEST_F(LoraOnAnotherBase, ItsAdapterIsRefused) {
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  run({"export", kModelFolder, "Wide", "--dtype", "f32", "--files", "tokenizer"});
  const std::string refused = ": expected the weights that it was trained on (Qwen3-30B-A3B), with the fingerprint ";
  const auto expect_wrong_base = [&](const std::vector<std::string>& words, const std::string& adapter) {
    const Ran ran = run_moebius(dir_, words);
    expect_refused(ran, 3, "adapter " + adapter + refused);
    EXPECT_THAT(ran.err, HasSubstr("bring back its own base, or add it to these all the same with --adapter " +
                                   adapter + " --any-base"));
  };
  write_safetensors(dir_.path("tokens"), {{{"tokens", DType::i32, {1, 4}}, std::vector<int32_t>{1, 2, 3, 4}.data()}});
  const std::vector<std::string> forward{"forward", "Other", "--tokens", "tokens", "--out", "logits"};
  for (const std::string& adapter : {std::string("Adapter"), std::string("runs/tuned")}) {
    const std::string path = adapter == "Adapter" ? adapter : "runs/tuned/checkpoints/step-00000002";
    const auto with = [&](std::vector<std::string> words, const std::vector<std::string>& more = {}) {
      words.insert(words.end(), {"--adapter", adapter});
      words.insert(words.end(), more.begin(), more.end());
      return words;
    };
    expect_wrong_base(with({"import", "Other", "x"}), path);
    EXPECT_FALSE(std::filesystem::exists(dir_.path("x")));
    expect_wrong_base(with({"generate", "Other", "--prompt", "day"}), path);
    expect_wrong_base(with({"chat", "Other"}), path);
    expect_wrong_base(with({"eval", "Other", "--data", "runs/tuned/data/pairs", "--seq-len", "48"}), path);
    expect_wrong_base(with(forward), path);
    // The same weights in other dtypes and files are the same base.
    run(with({"import", "Wide", "wide_" + path.substr(0, 4)}));
    run(with({"generate", "Other", "--prompt", "day", "--max-tokens", "2"}, {"--any-base"}));
    run(with(forward, {"--any-base"}));
  }
  run({"import", "Other", "x", "--adapter", "Adapter", "--any-base"});
  run({"import", kModelFolder, "imported"});
  run({"generate", "imported", "--adapter", "Adapter", "--prompt", "day", "--max-tokens", "2"});

  replace_base("Other");
  const std::string newest = "runs/tuned/checkpoints/step-00000002";
  expect_wrong_base({"eval", "runs/tuned", "--data", "runs/tuned/data/pairs", "--seq-len", "48"}, newest);
  expect_wrong_base({"export", "runs/tuned", "y"}, newest);
  expect_wrong_base({"generate", "runs/tuned", "--prompt", "day"}, newest);
  run({"export", "runs/tuned", "Again", "--adapter"});
  expect_same_adapters("Again", "Adapter");
  expect_wrong_base({"import", "Other", "y", "--adapter", "Again"}, "Again");

  // PEFT saves no fingerprint, so only names and shapes of its adapters can be compared.
  const SafetensorsFile file = adapter("Adapter");
  std::vector<std::vector<char>> bytes;
  std::vector<SafetensorsTensor> tensors;
  for (const SafetensorsEntry& e : file.entries()) bytes.push_back(bytes_of(file, e));
  for (size_t i = 0; i < bytes.size(); ++i)
    tensors.push_back({{file.entries()[i].name, DType::f32, file.entries()[i].shape}, bytes[i].data()});
  write_safetensors(dir_.path("Adapter/adapter_model.safetensors"), tensors);
  run({"import", "Other", "z", "--adapter", "Adapter"});
}

TEST_F(LoraOnAnotherBase, ACheckpointWithoutAFingerprintIsResumed) {
  const std::string path = dir_.path("runs/tuned/checkpoints/step-00000002/manifest.json");
  CheckpointManifest manifest = parse_manifest(read_file(path), "test");
  ASSERT_EQ(manifest.meta.erase("base"), 1u);
  write_file_atomic(path, to_text(manifest));
  EXPECT_THAT(
      train({"train.steps=3"}).err,
      HasSubstr("the checkpoint has no fingerprint of the weights in model.init_from = \"Qwen3-30B-A3B\", so they "
                "were not compared; the next checkpoint has one"));
  EXPECT_THAT(train({"train.steps=4"}).err, Not(HasSubstr("no fingerprint")));
}

TEST_F(LoraRun, ConfigCountsWhatIsTrained) {
  std::vector<std::string> words{"config", "tune.toml", "--json"};
  for (const std::string& set : kSmall) words.insert(words.end(), {"--set", set});
  const std::vector<std::string> more = with_adapters({"lora.targets=[\"q_proj\"]", "run.device=cpu"});
  words.insert(words.end(), more.begin(), more.end());
  const nlohmann::json json = json_of(run(words));
  EXPECT_EQ(json.at("trained_parameters"), 2 * 4 * (32 + 32));
  EXPECT_EQ(json.at("frozen_parameters"), json.at("parameters"));
  words.erase(words.begin() + 2);
  EXPECT_THAT(run(words).out, HasSubstr("# trained    512 parameters of adapters, 0."));
}

// Returns the per cent of the line "memory: predicted peak 84.1 MiB, measured 85.0 MiB, +1.1 %".
double measured_over_predicted(const Ran& ran) {
  const size_t measured = ran.err.find(", measured ");
  EXPECT_NE(measured, ran.err.npos) << ran.err;
  return measured == ran.err.npos ? 100 : std::atof(ran.err.c_str() + ran.err.find("B, ", measured + 3) + 3);
}

// Wide enough that the frozen model is most of the process.
TEST_F(LoraRun, MemoryIsPredicted) {
  if (is_under_address_sanitizer()) GTEST_SKIP() << "a sanitizer has memory of its own";
  run({"train", "base.toml", "--set", "run.dir=wide", "--set", "model.hidden_size=512", "--set",
       "model.moe_intermediate_size=1024", "--set", "model.num_experts=64", "--set", "model.num_hidden_layers=1",
       "--set", "train.steps=1"});
  run({"export", "wide", "Wide", "--dtype", "bf16", "--files", "tokenizer"});
  const Ran ran =
      run_guide("train", with_adapters({"model.hf=Wide", "model.init_from=Wide", "run.dir=adapted", "lora.rank=1",
                                        "train.steps=2", "lora.targets=[\"self_attn.*\", \"mlp.experts.*.up_proj\"]"}));
  EXPECT_NEAR(measured_over_predicted(ran), 0, 3) << ran.err;
}

// The process is little more than the program, pages of the BLAS library and the code that it generates.
TEST_F(LoraRun, MemoryOfATinyModelIsPredicted) {
  if (is_under_address_sanitizer()) GTEST_SKIP() << "a sanitizer has memory of its own";
  const Ran ran = run_guide("train", with_adapters({"train.steps=2", "precision.compute=f32"}));
  EXPECT_NEAR(measured_over_predicted(ran), 0, 8) << ran.err;
}

TEST_F(LoraRun, InvalidAdapterKeysAreRefused) {
  expect_training_refused({"lora.rank=0"}, 2, "lora.targets = [\"self_attn.*\"");
  expect_training_refused({"lora.rank=0"}, 2, "would do nothing: lora.rank is 0");
  expect_training_refused({"lora.rank=-1"}, 2, "lora.rank must be");
  expect_training_refused({"lora.targets=[]"}, 2, "lora.targets must name the matrices that get adapters");
  expect_training_refused({"lora.targets=[\"q_prj\"]"}, 2,
                          "\"q_prj\" matches none that can have an adapter, the nearest is q_proj of");
  expect_training_refused({"lora.targets=[\"all-linear\"]"}, 2, "got \"all-linear\" of PEFT; write \"*\"");
  expect_training_refused({"lora.targets=\"all-linear\""}, 2,
                          "lora.targets must be a list of name patterns; got \"all-linear\"; write [\"*\"] for all "
                          "matrices that can have an adapter");
  expect_training_refused({"lora.targets=\"q_proj, v_proj\""}, 2, "; write [\"q_proj\",\"v_proj\"]");
  expect_training_refused({"lora.dropout=1"}, 2, "lora.dropout must be a number of at least 0 and below 1");
  expect_training_refused(
      {"lora.base=fp8_block"}, 2,
      "lora.base = \"fp8_block\" has blocks of 128 rows: model.layers.0.self_attn.q_proj.weight has "
      "32 and is stored with other matrices");
  expect_training_refused({"lora.base=fp8_block", "precision.recipe=fp8_block"}, 2,
                          "multiplies in the dtype of the computation; got precision.recipe = \"fp8_block\"");
  expect_training_refused({"lora.base=mxfp4"}, 3,
                          "in MXFP4, since lora.base = \"mxfp4\" holds experts as they are read; got other numbers");
  expect_training_refused({"train.freeze=[\"*.mlp.gate.*\"]"}, 2, "all but the adapters is frozen");
  expect_training_refused({"run.dir=" + kModelFolder}, 2, "is inside run.dir");
  expect_training_refused({"lora.init_from=nothing"}, 3, "adapter nothing: expected a folder; got nothing there");
  expect_training_refused({"lora.init_from=" + kModelFolder}, 3, "got a model's folder without adapters");
  expect_refused(run_moebius(dir_, {"export", kModelFolder, "out", "--adapter"}), 3,
                 "got a model's folder without adapters");
}

}  // namespace
}  // namespace moebius

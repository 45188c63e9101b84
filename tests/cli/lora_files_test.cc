// Adapters as files, from the command line: exported, merged, and added to a model.
#include "tests/cli/lora_run.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::Not;

// Experts are one parameter of all in transformers 5, where gate and up share an A.
TEST_F(LoraRun, AdaptsAllExpertsAsOneParameter) {
  const std::string targets = "lora.targets=[\"q_proj\", \"mlp.experts.gate_up_proj\", \"mlp.experts.down_proj\"]";
  run_guide("train", with_adapters({"train.steps=4", targets}));
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  const nlohmann::json config = nlohmann::json::parse(read_file(dir_.path("Adapter/adapter_config.json")));
  EXPECT_EQ(config.at("target_parameters"), nlohmann::json({"mlp.experts.down_proj", "mlp.experts.gate_up_proj"}));
  EXPECT_FALSE(config.contains("rank_pattern"));
  const SafetensorsFile file = adapter("Adapter");
  EXPECT_EQ(file.entries().size(), 2u * (2 + 2 + 2));
  const std::string layer = "base_model.model.model.layers.1.mlp.experts.";
  EXPECT_EQ(file.at(layer + "base_layer.lora_A.weight").shape, (std::vector<int64_t>{4 * 4, 32}));
  EXPECT_EQ(file.at(layer + "base_layer.lora_B.weight").shape, (std::vector<int64_t>{2 * 24, 4 * 4}));
  EXPECT_EQ(file.at(layer + "lora_A.weight").shape, (std::vector<int64_t>{4 * 4, 24}));

  run({"import", kModelFolder, "merged", "--adapter", "Adapter"});
  EXPECT_EQ(eval_loss("merged"), eval_loss("runs/tuned"));
  run_guide("train",
            with_adapters({"run.dir=again", "lora.init_from=Adapter", "train.steps=1", "optimizer.lr=1e-30", targets}));
  run({"export", "again", "Again", "--adapter"});
  expect_same_adapters("Again", "Adapter");
  // The A of both begins the A of each.
  run_guide("train", with_adapters({"run.dir=apart", "lora.init_from=Adapter", "train.steps=1", "optimizer.lr=1e-30",
                                    "lora.targets=[\"q_proj\", \"mlp.experts.*\"]"}));
  EXPECT_NEAR(eval_loss("apart"), eval_loss("runs/tuned"), 1e-6);
  run({"export", "apart", "Apart", "--adapter"});
  expect_training_refused(
      {"run.dir=other", "lora.init_from=Apart", targets}, 3,
      "expected the adapters of lora.targets; 8 missing (model.layers.0.mlp.experts.0.gate_up_proj");
}

TEST_F(LoraRun, ExportsAdaptersOfExpertsAsOneParameter) {
  run_guide("train", with_adapters({"train.steps=4"}));
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  run({"export", "runs/tuned", "Fused", "--adapter", "--fused-experts"});
  const nlohmann::json config = nlohmann::json::parse(read_file(dir_.path("Fused/adapter_config.json")));
  EXPECT_EQ(config.at("target_parameters"),
            nlohmann::json({"mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight"}));
  EXPECT_EQ(config.at("rank_pattern").at("model.layers.1.mlp.experts.gate_up_proj"), 8);
  EXPECT_EQ(config.at("alpha_pattern").at("model.layers.1.mlp.experts.gate_up_proj"), 16);
  run({"import", kModelFolder, "merged", "--adapter", "Fused"});
  EXPECT_EQ(eval_loss("merged"), eval_loss("runs/tuned"));
  run_guide("train", with_adapters({"run.dir=again", "lora.init_from=Fused", "train.steps=1", "optimizer.lr=1e-30"}));
  run({"export", "again", "Again", "--adapter"});
  expect_same_adapters("Again", "Adapter");
  expect_refused(run_moebius(dir_, {"export", "runs/tuned", "x", "--fused-experts"}), 2,
                 "--fused-experts requires --adapter");
}

// The one parameter has a B for up, too, which is 0.
TEST_F(LoraRun, StartsFromAdaptersOfGateAloneAsOneParameter) {
  const std::string targets = "lora.targets=[\"mlp.experts.*.gate_proj\"]";
  run_guide("train", with_adapters({"train.steps=3", targets}));
  run({"export", "runs/tuned", "Fused", "--adapter", "--fused-experts"});
  run_guide("train",
            with_adapters({"run.dir=again", "lora.init_from=Fused", "train.steps=1", "optimizer.lr=1e-30", targets}));
  run({"export", "again", "Again", "--adapter", "--fused-experts"});
  expect_same_adapters("Again", "Fused");
  run_guide("train", with_adapters({"run.dir=both", "train.steps=3", "lora.targets=[\"mlp.experts.gate_up_proj\"]"}));
  expect_training_refused({"run.dir=other", "lora.init_from=both", targets}, 3,
                          "expected the adapters of lora.targets; 8 unexpected (model.layers.0.mlp.experts.0.up_proj");
}

// PEFT refuses to convert adapters of gate without those of up.
TEST_F(LoraRun, TheExportWarnsOfAdaptersThatPeftCannotConvert) {
  run_guide("train", with_adapters({"train.steps=1", "lora.targets=[\"mlp.experts.*.gate_proj\"]"}));
  const char* warning = "Adapter is for transformers 4. With transformers 5, PEFT loses or refuses adapters";
  EXPECT_THAT(run_moebius(dir_, {"export", "runs/tuned", "Adapter", "--adapter"}).err, HasSubstr(warning));
  EXPECT_THAT(run_moebius(dir_, {"export", "runs/tuned", "Fused", "--adapter", "--fused-experts"}).err,
              Not(HasSubstr("transformers 4")));
  run_guide("train", with_adapters({"run.dir=all", "train.steps=1"}));
  EXPECT_THAT(run_moebius(dir_, {"export", "all", "All", "--adapter"}).err, Not(HasSubstr("transformers 4")));
}

// PEFT converts no adapters of qwen2_moe: it loses those of routed experts, and reads those of shared ones as they are.
TEST_F(LoraRun, TheExportWarnsOfAdaptersOfQwen2MoeThatPeftDoesNotConvert) {
  run({"train", "base.toml", "--set", "run.dir=qwen2", "--set", "train.steps=1", "--set", "model.model_type=qwen2_moe",
       "--set", "model.shared_expert_intermediate_size=24", "--set", "model.norm_topk_prob=false"});
  run({"export", "qwen2", "Qwen2", "--dtype", "bf16", "--files", "tokenizer"});
  const auto exported = [&](const std::string& name, const std::string& target) {
    run_guide("train", with_adapters({"model.hf=Qwen2", "model.init_from=Qwen2", "train.steps=1", "run.dir=" + name,
                                      "lora.targets=[\"" + target + "\"]"}));
    return run({"export", name, name + "_adapter", "--adapter"}).err;
  };
  const char* warning = "experts_adapter is for transformers 4. With transformers 5, PEFT loses or refuses adapters";
  EXPECT_THAT(exported("experts", "mlp.experts.*"), HasSubstr(warning));
  EXPECT_THAT(exported("routers", "mlp.gate"), HasSubstr("those of routed experts and routers of qwen2_moe"));
  EXPECT_THAT(exported("shared", "mlp.shared_experts.*"), Not(HasSubstr("transformers 4")));
  EXPECT_THAT(exported("attention", "self_attn.*"), Not(HasSubstr("transformers 4")));
}

TEST_F(LoraRun, GeneratesWithAnAdapterAsWithTheMergedModel) {
  run_guide("train", with_adapters());
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  run({"import", kModelFolder, "merged", "--adapter", "Adapter"});
  const auto text_of = [&](const std::string& model, const std::vector<std::string>& more) {
    std::vector<std::string> words{"generate",     model, "--prompt", "day 3?", "--temperature", "0", "--json",
                                   "--max-tokens", "12",  "--dtype",  "f32"};
    words.insert(words.end(), more.begin(), more.end());
    return run(words).out;
  };
  const std::string expected = text_of("merged", {});
  EXPECT_NE(text_of(kModelFolder, {}), expected);
  EXPECT_EQ(text_of("runs/tuned", {}), expected);
  for (const char* adapter : {"Adapter", "runs/tuned"})
    EXPECT_EQ(text_of(kModelFolder, {"--adapter", adapter}), expected) << adapter;
  for (const std::vector<std::string>& layout : std::vector<std::vector<std::string>>{
           {"tp=2"}, {"ep=2"}, {"etp=2"}, {"pp=2"}, {"tp=2", "ep=2"}, {"pp=2", "ep=2"}}) {
    std::vector<std::string> words{"--adapter", "Adapter", "--ranks",
                                   layout[0] == "pp=2" && layout.size() == 2 ? "4" : "2"};
    for (const std::string& key : layout) words.insert(words.end(), {"--set", "parallel." + key});
    EXPECT_EQ(text_of(kModelFolder, words), expected) << layout[0];
  }
  const auto refused = [&](const std::vector<std::string>& more, int code, const std::string& text) {
    std::vector<std::string> words{"generate", kModelFolder, "--prompt", "day"};
    words.insert(words.end(), more.begin(), more.end());
    expect_refused(run_moebius(dir_, words), code, text);
  };
  refused({"--adapter", "none"}, 3, "adapter none: expected a folder; got nothing there; check the path");
  refused({"--adapter", "none", "--ranks", "2", "--set", "parallel.ep=2"}, 3,
          "error: adapter none: expected a folder; got nothing there; check the path");
  refused({"--adapter", ""}, 2, "--adapter: expected a path; got an empty text");
  refused({"--any-base"}, 2, "--any-base requires --adapter");
  run({"train", "base.toml", "--set", "run.dir=wide", "--set", "model.hidden_size=40", "--set", "train.steps=1"});
  expect_refused(run_moebius(dir_, {"generate", "wide", "--adapter", "Adapter", "--prompt", "day"}), 3,
                 "adapter Adapter: expected A [4, in] and B [out, 4] of matrices of the model; got ");
}

// `eval --adapter` adds an adapter as `generate` does, and a run's adapters as the evaluation of the run does.
TEST_F(LoraRun, EvaluatesWithAnAdapterAsWithTheMergedModel) {
  run_guide("train", with_adapters());
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  run({"import", kModelFolder, "merged", "--adapter", "Adapter"});
  const auto eval = [&](const std::string& model, const std::vector<std::string>& more) {
    std::vector<std::string> words{"eval", model, "--data", "runs/tuned/data/pairs", "--seq-len", "48", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const auto loss = [&](const std::string& model, const std::vector<std::string>& more = {}) {
    return json_of(run(eval(model, more))).at("loss").get<double>();
  };
  const double expected = loss("merged");
  EXPECT_LT(expected, 0.95 * loss(kModelFolder));
  EXPECT_EQ(loss("runs/tuned"), expected);
  for (const char* adapter : {"Adapter", "runs/tuned", "runs/tuned/checkpoints/step-00000030"})
    EXPECT_EQ(loss(kModelFolder, {"--adapter", adapter}), expected) << adapter;
  for (const char* layout : {"tp=2", "ep=2", "etp=2", "pp=2", "cp=2"}) {
    const std::vector<std::string> words{
        "--dtype", "f32", "--ranks", "2", "--set", std::string("parallel.") + layout, "--adapter", "Adapter"};
    EXPECT_NEAR(loss(kModelFolder, words), loss("merged", {"--dtype", "f32"}), 2e-6) << layout;
  }
  const auto refused = [&](const std::string& model, const std::vector<std::string>& more, int code,
                           const std::string& text) {
    expect_refused(run_moebius(dir_, eval(model, more)), code, text);
  };
  refused(kModelFolder, {"--adapter", "none"}, 3, "adapter none: expected a folder; got nothing there; check the path");
  refused(kModelFolder, {"--adapter", "none", "--ranks", "2", "--set", "parallel.ep=2"}, 3,
          "error: adapter none: expected a folder; got nothing there; check the path");
  refused(kModelFolder, {"--adapter", ""}, 2, "--adapter: expected a path; got an empty text");
  refused(kModelFolder, {"--any-base"}, 2, "--any-base requires --adapter");
  refused(kModelFolder, {"--adapter", kModelFolder}, 3, "got a model's folder without adapters");
  refused("Adapter", {}, 3, "give its model and --adapter Adapter to eval, generate and chat");
  // The merged model has other weights than those that the adapter was trained on.
  refused("merged", {"--adapter", "Adapter"}, 3, "bring back its own base, or add it to these all the same with");
  EXPECT_GT(loss("merged", {"--adapter", "Adapter", "--any-base"}), 0);
}

// The same model three ways: import of model and adapter, export of the run, and the run itself.
TEST_F(LoraRun, AnAdapterIsMergedOnImport) {
  run_guide("train", with_adapters({"train.steps=4"}));
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  run({"import", kModelFolder, "merged", "--adapter", "Adapter"});
  EXPECT_EQ(eval_loss("merged"), eval_loss("runs/tuned"));
  run({"export", "runs/tuned", "exported"});
  run({"export", "merged", "imported"});
  for (const char* name : {"model.layers.1.mlp.experts.2.down_proj.weight", "model.layers.0.mlp.gate.weight"})
    EXPECT_EQ(tensor("imported", name), tensor("exported", name)) << name;
  expect_refused(run_moebius(dir_, {"import", kModelFolder, "other", "--adapter", kModelFolder}), 3,
                 "or a run with [lora]; got a model's folder without adapters");
  EXPECT_FALSE(std::filesystem::exists(dir_.path("other")));
}

TEST_F(LoraRun, AdaptersWithoutAMatchingTensorAreRefused) {
  run_guide("train", with_adapters({"train.steps=1", "lora.targets=[\"q_proj\"]"}));
  run({"export", "runs/tuned", "Adapter", "--adapter"});
  const auto refused = [&](const std::vector<std::string>& sets, const std::string& text) {
    std::vector<std::string> all{"run.dir=other", "lora.init_from=Adapter"};
    all.insert(all.end(), sets.begin(), sets.end());
    expect_training_refused(all, 3, text);
  };
  refused({}, "expected the adapters of lora.targets; 64 missing (");
  refused({"lora.targets=[\"q_proj\"]", "lora.rank=5"}, "expected lora.rank = 5 and lora.alpha = 8; it has 4 and 8");
  std::filesystem::create_directory(dir_.path("Wide"));
  std::filesystem::copy(dir_.path("Adapter/adapter_config.json"), dir_.path("Wide/adapter_config.json"));
  const std::vector<float> zeros(4 * 33);
  write_safetensors(
      dir_.path("Wide/adapter_model.safetensors"),
      {{{"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", DType::f32, {4, 33}}, zeros.data()},
       {{"base_model.model.model.layers.0.self_attn.query.lora_B.weight", DType::f32, {32, 4}}, zeros.data()}});
  refused({"lora.init_from=Wide"},
          "1 that fit no matrix (model.layers.0.self_attn.query.lora_B.weight); 1 of another shape "
          "(model.layers.0.self_attn.q_proj.lora_A.weight [4, 33])");
  nlohmann::json config = nlohmann::json::parse(read_file(dir_.path("Adapter/adapter_config.json")));
  config["use_dora"] = true;
  write_file_atomic(dir_.path("Adapter/adapter_config.json"), config.dump());
  refused({}, "adapter_config.json: use_dora must be false; got true");
}

}  // namespace
}  // namespace moebius

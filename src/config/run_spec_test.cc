#include "config/run_spec.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "config/other_names.h"
#include "config/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

const std::string kRecipes = std::string(MOEBIUS_SOURCE_DIR) + "/recipes/";

// Returns the fewest ranks that the degrees of a recipe allow.
int64_t ranks_of(const ParallelSpec& p) { return std::lcm(p.tp * p.cp, p.etp * p.ep) * p.pp; }

TEST(Recipes, AllParseAndCheck) {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(kRecipes)) {
    const RunSpec spec = load_run_spec(file.path(), {});
    EXPECT_NO_THROW(spec.check(ranks_of(spec.parallel))) << file;
    EXPECT_EQ(without_provenance(read_back(spec, true)), without_provenance(spec)) << file;
    ++count;
  }
  EXPECT_GE(count, 5);
}

TEST(Recipes, SizesOfReleasedModels) {
  EXPECT_EQ(load_run_spec(kRecipes + "qwen3_30b_a3b.toml", {}).model.num_parameters(), 30532122624);
  EXPECT_EQ(load_run_spec(kRecipes + "mixtral_8x7b.toml", {}).model.num_parameters(), 46702792704);
}

TEST(Recipes, DemoHasEightExpertsAndASharedOne) {
  const RunSpec spec = load_run_spec(kRecipes + "demo.toml", {});
  EXPECT_GE(spec.model.num_experts, 8);
  EXPECT_EQ(spec.model.top_k, 2);
  EXPECT_GT(spec.model.shared_intermediate_size, 0);
  EXPECT_LT(spec.model.num_kv_heads, spec.model.num_heads);
  EXPECT_EQ(spec.precision.compute, DType::bf16);
  EXPECT_EQ(spec.dir, "runs/demo");
  EXPECT_NO_THROW(spec.check_trainable());
}

// A hint for a name of other software points to a key that exists.
TEST(RecipeKeys, CoverAllOtherNames) {
  const std::vector<std::string> keys = recipe_keys();
  for (const std::string name :
       {"learning_rate",     "num_train_epochs",   "bf16",         "max_grad_norm", "top_k",          "output_dir",
        "target_parameters", "lora_target_linear", "load_in_4bit", "base_model",    "sample_packing", "datasets",
        "val_set_size",      "grad_clip",          "vocab_file",   "split",         "load",           "save",
        "no_load_optim",     "recompute_method"}) {
    const std::string hint = other_name_hint("train." + name);
    EXPECT_TRUE(std::any_of(keys.begin(), keys.end(),
                            [&](const std::string& key) { return hint.find("that is " + key) != std::string::npos; }))
        << name << hint;
  }
}

TEST(Parse, EveryKindOfValue) {
  const RunSpec s = parse({"run.dir=/tmp/a b", "run.seed=9223372036854775807", "run.device=cuda", "data.train=[\"p\"]",
                           "data.valid=[{prefix=\"q\", weight=3}, \"r\"]", "optimizer.schedule=wsd",
                           "moe.balance=[\"seq_aux\", \"bias\"]", "moe.drop_policy=position",
                           "moe.router_dtype=compute", "precision.compute=f32", "checkpoint.async=false"});
  EXPECT_EQ(s.dir, "/tmp/a b");
  EXPECT_EQ(s.seed, uint64_t{INT64_MAX});
  EXPECT_EQ(s.device, DeviceKind::cuda);
  EXPECT_EQ(s.data.train, (std::vector<DatasetSpec>{{"p", 1.0}}));
  EXPECT_EQ(s.data.valid, (std::vector<DatasetSpec>{{"q", 3.0}, {"r", 1.0}}));
  EXPECT_EQ(s.optimizer.schedule, LrSchedule::wsd);
  EXPECT_TRUE(s.moe.seq_aux && s.moe.bias && !s.moe.aux && !s.moe.global_aux && !s.moe.sinkhorn);
  EXPECT_EQ(s.moe.drop_policy, DropPolicy::position);
  EXPECT_FALSE(s.moe.router_f32);
  EXPECT_EQ(s.precision.compute, DType::f32);
  EXPECT_FALSE(s.checkpoint.async_save);
  EXPECT_EQ(s.train.steps, 9);
  EXPECT_EQ(s.model.top_k, 2);
  EXPECT_FALSE(parse({"moe.balance=aux", "moe.balance=none"}).moe.aux);
}

TEST(Parse, ErrorsNameTheKeyTheExpectationAndThePlace) {
  EXPECT_THAT(parse_error({"optimizer.lr=nan"}),
              HasSubstr("--set: optimizer.lr must be a finite number above 0, from 1e-37 to 1e+37; got nan"));
  EXPECT_THAT(parse_error({"train.steps=1.5"}),
              HasSubstr("train.steps must be a whole number from 1 to 1000000000; got 1.5"));
  EXPECT_THAT(parse_error({"train.steps=0"}), HasSubstr("got 0"));
  EXPECT_THAT(parse_error({"run.seed=-1"}),
              HasSubstr("run.seed must be a whole number from 0 to 9223372036854775807; got -1"));
  EXPECT_THAT(parse_error({"optimizer.beta2=1"}),
              HasSubstr("optimizer.beta2 must be a number of at least 0 and below 1: 0, or from"));
  EXPECT_THAT(
      parse_error({"moe.capacity_factor=-0.5"}),
      HasSubstr("moe.capacity_factor must be a finite number of at least 0: 0, or from 1e-37 to 1000000; got -0.5"));
  for (const char* factor : {"nan", "inf", "1e300", "-1.0"})
    EXPECT_THAT(parse_error({fmt::format("moe.rank_rows_factor={}", factor)}),
                HasSubstr("moe.rank_rows_factor must be a finite number of at least 0: 0, or from 1e-37 to 1000000"));
  EXPECT_THAT(parse_error({"moe.balance=[\"none\"]"}),
              HasSubstr("moe.balance must be \"none\", or one or a list without repeats of"));
  EXPECT_THAT(parse_error({"moe.balance=[\"aux\", \"aux\"]"}), HasSubstr("got [\"aux\",\"aux\"]"));
  EXPECT_THAT(parse_error({"precision.compute=fp8"}),
              HasSubstr("precision.compute must be \"f32\" or \"bf16\"; got \"fp8\""));
  EXPECT_THAT(parse_error({"memory.recompute=[\"norm\", \"experts\"]"}),
              HasSubstr("memory.recompute must be a list without repeats of \"norm\", "
                        "\"qkv\", \"mla_up_proj\", \"attention\", \"mlp\", \"shared_expert\", \"expert_up\", "
                        "\"layer\", each for all layers or as \"norm:0-3,7\" for some, or \"auto\"; got "
                        "[\"norm\",\"experts\"]; did you mean \"expert_up\"?"));
  for (const char* range : {"", "a", "-1", "3-", "2-1", "0-3,3", "1,0", "0-1000000000"})
    EXPECT_THAT(parse_error({fmt::format("memory.recompute=[\"norm:{}\"]", range)}),
                HasSubstr("each for all layers or as \"norm:0-3,7\" for some"))
        << range;
  EXPECT_THAT(parse_error({"memory.recompute=[\"norm\", \"norm:0-1\"]"}), HasSubstr("without repeats"));
  EXPECT_EQ(parse({"memory.recompute=[\"norm:0-1,2\"]"}).memory.recompute,
            parse({"memory.recompute=[\"norm:0-2\"]"}).memory.recompute);
  EXPECT_THAT(parse_error({"memory.recompute=[\"moe_act\"]"}),
              HasSubstr("; outputs of the experts' activation are never kept, so there is nothing to name"));
  EXPECT_THAT(parse_error({"memory.recompute=full"}), HasSubstr("; here that is \"layer\""));
  for (const char* bytes : {"80", "GiB", "-1GiB", "80 GiB", "1e30TiB", "nanGiB", "0B", "80gib"})
    EXPECT_THAT(parse_error({fmt::format("memory.fit=\"{}\"", bytes)}),
                HasSubstr("memory.fit must be bytes with a unit, such as \"80GiB\" or \"79.5GB\", or \"\""))
        << bytes;

  EXPECT_THAT(parse_error({"memory.offload=[\"norm\", \"layer_inputs\"]"}),
              HasSubstr("memory.offload must be a list without repeats of \"layer_input\", \"norm\", \"qkv\", "
                        "\"mla_up_proj\", \"attention\", \"mlp\", \"shared_expert\", \"expert_up\", \"layer\", "
                        "\"weights\"; got [\"norm\",\"layer_inputs\"]; did you mean \"layer_input\"?"));
  EXPECT_THAT(parse_error({"memory.offload=[\"qkv\", \"qkv\"]"}), HasSubstr("got [\"qkv\",\"qkv\"]"));
  EXPECT_THAT(parse_error({"memory.offload=[\"weights\", \"weights\"]"}), HasSubstr("got [\"weights\",\"weights\"]"));
  EXPECT_THAT(parse_error({"memory.offload=qkv"}), HasSubstr("memory.offload must be a list"));
  EXPECT_THAT(parse_error({"memory.offload=[\"qkv:0-3\"]"}),
              HasSubstr("; a name is for all layers, and memory.offload_fraction says how many of them"));
  EXPECT_THAT(parse_error({"memory.offload=[\"moe_act\"]"}), HasSubstr("; its input is \"expert_up\" here"));
  for (const char* fraction : {"0", "-0.5", "1.5", "\"half\"", "nan"})
    EXPECT_THAT(parse_error({fmt::format("memory.offload_fraction={}", fraction)}),
                HasSubstr("memory.offload_fraction must be a number above 0, at most 1"))
        << fraction;
  EXPECT_THAT(parse_error({"memory.recompute=layers"}), HasSubstr("got \"layers\"; did you mean \"layer\"?"));
  EXPECT_THAT(parse_error({"memory.recompute=[\"qkv\", \"qkv\"]"}), HasSubstr("got [\"qkv\",\"qkv\"]"));
  EXPECT_THAT(parse_error({"data.train=[{prefix=\"a\", weigth=2}]"}),
              HasSubstr("data.train must be a list of \"PREFIX\" or"));
  EXPECT_THAT(parse_error({"data.train=a"}), HasSubstr("got \"a\""));
  EXPECT_THAT(parse_error({"model.hidden_size=big"}), HasSubstr("model.hidden_size must be a whole number"));
  EXPECT_THAT(parse_error({"model.hidden_act=gelu"}),
              HasSubstr("r.toml [model]: hidden_act must be \"silu\"; got \"gelu\""));
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec("\n[run]\nseed = \"x\"", "r.toml", {}); }),
              HasSubstr("r.toml:3: run.seed must be a whole number"));
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec("[run", "r.toml", {}); }),
              HasSubstr("r.toml:1:5: not TOML"));
}

TEST(Parse, UnknownKeysNameTheNearest) {
  EXPECT_THAT(parse_error({"train.step=3"}), HasSubstr("--set: unknown key train.step; did you mean train.steps?"));
  EXPECT_THAT(parse_error({"train.lr=3"}), HasSubstr("train.lr; here that is optimizer.lr"));
  EXPECT_THAT(parse_error({"model.num_expert=3"}), HasSubstr("did you mean model.num_experts?"));
  EXPECT_THAT(parse_error({"steps=3"}), HasSubstr("unknown key steps; did you mean train.steps?"));
  EXPECT_THAT(parse_error({"train.learning_rate=3"}),
              testing::EndsWith("unknown key train.learning_rate; here that is optimizer.lr"));
  EXPECT_THAT(parse_error({"train.epochs=3"}), HasSubstr("here that is train.steps (there are no epochs"));
  EXPECT_THAT(parse_error({"train.fp16=true"}), HasSubstr("here that is precision.compute (\"bf16\" or \"f32\")"));
  EXPECT_THAT(parse_error({"train.gradient_accumulation_steps=2"}),
              HasSubstr("here that is train.global_batch (global_b"));
  EXPECT_THAT(parse_error({"train.patience=3"}),
              testing::EndsWith("unknown key train.patience; moebius config --keys lists them all"));
  EXPECT_THAT(parse_error({"train. steps=3"}), HasSubstr("unknown key \"train. steps\"; did you mean train.steps?"));
  EXPECT_EQ(parse({"train.steps = 4", " run.dir = a b "}).train.steps, 4);
  EXPECT_EQ(parse({"run.dir = a b "}).dir, "a b");
  EXPECT_THAT(parse_error({"parallel.dp=2"}), HasSubstr("parallel.dp is not a key; it is what tp, cp and pp leave"));
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec("[logs]\n" + kModel, "r.toml", {}); }),
              HasSubstr("r.toml:1: unknown key logs; did you mean log.every?"));
  EXPECT_NO_THROW(parse_run_spec("[log]\n" + kModel, "r.toml", {}));
}

TEST(Parse, AValueForASectionIsExplained) {
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec("run = 3\n" + kModel, "r.toml", {}); }),
              HasSubstr("r.toml:1: run is a section; write its keys under [run]; got the value 3"));
  EXPECT_THAT(parse_error({"parallel=2"}), HasSubstr("--set: parallel is a section"));
}

TEST(Parse, UnknownKeysOfMegatronAreTranslated) {
  const auto hint = [](const std::string& key) {
    const std::string text = parse_error({key + "=3"});
    return text.substr(text.find(key) + key.size());
  };
  EXPECT_EQ(hint("train.report_to"),
            "; here that is log.tensorboard (the only tracker; metrics.jsonl has the same figures)");
  EXPECT_EQ(hint("train.random_state"), "; here that is run.seed");
  EXPECT_EQ(hint("moe.router_topk"), "; here that is model.num_experts_per_tok");
  EXPECT_EQ(hint("model.ffn_hidden_size"), "; here that is model.intermediate_size");
  EXPECT_EQ(hint("moe.token_dispatcher_type"), "; here that is parallel.dispatcher");
  EXPECT_EQ(hint("data.path"), "; here that is data.train");
  EXPECT_EQ(hint("data.tokenizer_model"), "; here that is data.tokenizer");
  EXPECT_EQ(hint("expert-model-parallel-size"), "; here that is parallel.ep");
  EXPECT_EQ(hint("--expert-model-parallel-size"), "; here that is parallel.ep");
  for (const char* key : {"parallel.sp", "parallel.sequence_parallel"})
    EXPECT_EQ(hint(key), "; here that is on wherever parallel.tp is above 1");
  EXPECT_EQ(hint("lora.r"), "; here that is lora.rank");
  EXPECT_EQ(hint("lora.target_modules"), "; here that is lora.targets");
  EXPECT_THAT(hint("memory.recompute_granularity"), HasSubstr("; here that is memory.recompute"));
  EXPECT_THAT(hint("log.wandb"), HasSubstr("; here that is log.tensorboard"));
}

TEST(Parse, ModelKeysOfAnotherFamilyAreRefusedInline) {
  EXPECT_THAT(
      parse_error({"model.model_type=mixtral", "model.qk_norm=true"}),
      HasSubstr(
          "r.toml:10: model.moe_intermediate_size is not a key of model_type \"mixtral\"; \"moebius\" has every key, "
          "but cannot be exported to Hugging Face"));
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec(kRest, "r.toml", {}); }),
              HasSubstr("r.toml: the recipe has no model; give [model] hf = \"DIR\", or the keys of its config.json"));
}

TEST(Parse, BalanceByBiasGivesTheModelABias) {
  const RunSpec spec = parse({"moe.balance=bias"});
  EXPECT_TRUE(spec.model.expert_bias);
  EXPECT_EQ(spec.provenance.at("model.expert_bias"), "moe.balance");
  EXPECT_NO_THROW(spec.check(1));
  EXPECT_THAT(parse_error({"moe.balance=bias", "model.expert_bias=false"}),
              HasSubstr("--set: model.expert_bias = false and moe.balance \"bias\" (--set) contradict each other"));
  EXPECT_THAT(check_error({"moe.balance=bias", "model.model_type=qwen3_moe", "model.num_key_value_heads=1"}),
              HasSubstr("moe.balance \"bias\" needs a model with expert_bias; model_type \"qwen3_moe\" has none: use "
                        "another balance, or \"moebius\", which cannot be exported to Hugging Face [--set]"));
}

TEST(Load, FilesThatCannotBeRead) {
  EXPECT_THAT(error_text(ErrorKind::io, [] { load_run_spec("/nowhere/r.toml", {}); }),
              HasSubstr("/nowhere/r.toml: cannot read the recipe"));
  EXPECT_THAT(error_text(ErrorKind::io, [] { load_run_spec(testing::TempDir(), {}); }),
              HasSubstr(": expected the recipe; got a folder; give the file"));
  EXPECT_THAT(error_text(ErrorKind::io, [] { load_run_spec("/dev/zero", {}); }),
              HasSubstr("/dev/zero: expected the recipe, at most 16777216 bytes; got more; check the path"));
  const ConfigFolder empty("");  // the file is there and can be read
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { load_run_spec(empty.path() + "/config.json", {}); }),
              HasSubstr("config.json: the recipe has no model; give [model]"));
  EXPECT_THAT(error_text(ErrorKind::io, [] { parse_run_spec("[model]\nhf = \"/nowhere\"", "r.toml", {}); }),
              HasSubstr("/nowhere/config.json: cannot read the model's config.json; there is no folder"));
  const ConfigFolder broken("{");
  EXPECT_THAT(error_text(ErrorKind::input, [&] { parse_run_spec("", "r.toml", {"model.hf=" + broken.path()}); }),
              HasSubstr("/config.json: expected a JSON object; the file is not one; fetch it again"));
  const ConfigFolder other("{\"model_type\": \"gpt2\"}");
  EXPECT_THAT(error_text(ErrorKind::input, [&] { parse_run_spec("", "r.toml", {"model.hf=" + other.path()}); }),
              HasSubstr("/config.json: model_type must be one of"));
}

// Without the key, layers whose activations are in 8 bits recompute the outputs of their norms.
TEST(Parse, ActivationsInEightBitsRecomputeNorms) {
  const auto recomputes = [](std::vector<std::string> sets) {
    sets.insert(sets.end(), {"precision.recipe=fp8_block"});
    const RunSpec spec = parse(sets);
    EXPECT_EQ(read_back(spec, false).memory, spec.memory);
    return spec.memory.recompute.norm;
  };
  const std::string saved = "precision.activations=recipe";
  EXPECT_TRUE(recomputes({saved}));
  EXPECT_FALSE(recomputes({}));
  EXPECT_FALSE(recomputes({saved, "memory.recompute=[]"}));
  EXPECT_FALSE(recomputes({saved, "memory.recompute=[\"qkv\"]"}));
  EXPECT_FALSE(recomputes({saved, "memory.recompute=auto", "memory.fit=1GiB"})) << "it is chosen";
  EXPECT_FALSE(recomputes({saved, "memory.offload=[\"norm\"]"})) << "they are kept on the host";
  EXPECT_EQ(parse({"precision.recipe=fp8_block", saved}).provenance.at("memory.recompute"), "default");
}

TEST(Load, TheTokenizerOfAModelsFolderIsTheDefault) {
  const ConfigFolder folder("{\"model_type\": \"mixtral\"}");
  const std::string hf = "model.hf=" + folder.path();
  EXPECT_EQ(parse_run_spec(kRest, "r.toml", {hf}).data.tokenizer, "bytes") << "the folder has none";
  std::ofstream(folder.path() + "/tokenizer.json") << "{}";
  const RunSpec spec = parse_run_spec(kRest, "r.toml", {hf});
  EXPECT_EQ(spec.data.tokenizer, folder.path());
  EXPECT_EQ(spec.provenance.at("data.tokenizer"), "model.hf");
  EXPECT_EQ(read_back(spec, true).data.tokenizer, folder.path());
  EXPECT_EQ(parse_run_spec(kRest, "r.toml", {hf, "data.tokenizer=bytes"}).data.tokenizer, "bytes");
}

TEST(Load, ARecipeExtendsTheContextOfAModelsFolder) {
  const ConfigFolder folder(
      "{\"model_type\": \"qwen3_moe\", \"max_position_embeddings\": 64, \"rope_theta\": 5000.0, \"num_experts\": 4}");
  const RunSpec spec = parse_run_spec(kRest, "r.toml",
                                      {"model.hf=" + folder.path(), "model.max_position_embeddings=256",
                                       "model.rope_scaling={rope_type=\"yarn\",factor=4.0}"});
  EXPECT_EQ(spec.model.max_position_embeddings, 256);
  EXPECT_EQ(spec.model.rope_theta, 5000.0);
  EXPECT_EQ(spec.model.rope_scaling.type, RopeType::yarn);
  EXPECT_EQ(spec.model.rope_scaling.original_positions, 64) << "what the model was trained on";
  EXPECT_EQ(spec.model.num_experts, 4);
  EXPECT_EQ(spec.provenance.at("model.max_position_embeddings"), "--set");
  EXPECT_EQ(read_back(spec, true).model, spec.model);
  EXPECT_EQ(parse_run_spec(kRest, "r.toml", {"model.hf=" + folder.path(), "model.rope_theta=1e6"}).model.rope_theta,
            1e6);
}

// A folder's config.json may have entries for other software, and a recipe's table may not.
TEST(Load, UnreadEntriesOfATableOfRopeAreRefused) {
  const ConfigFolder folder(
      "{\"model_type\": \"qwen3_moe\", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2, \"other\": 1}}");
  const std::string hf = "model.hf=" + folder.path();
  EXPECT_NO_THROW(parse_run_spec(kRest, "r.toml", {hf}));
  const auto error = [&](const std::string& set) {
    return error_text(ErrorKind::usage, [&] { parse_run_spec(kRest, "r.toml", {hf, set}); });
  };
  EXPECT_THAT(error("model.rope_scaling={rope_type=\"yarn\",factor=4.0,original_max_positions_embedding=64}"),
              HasSubstr("--set: model.rope_scaling has no entry original_max_positions_embedding; did you mean "
                        "original_max_position_embeddings?; its entries are rope_theta, rope_type, "));
  EXPECT_THAT(
      error_text(ErrorKind::usage, [&] { parse({"model.rope_scaling={rope_type=\"linear\",factor=4.0,stretch=2}"}); }),
      HasSubstr("--set: model.rope_scaling has no entry stretch; its entries are"));
}

TEST(Load, ModelOfAFolderIsHeldInTheResolvedRecipe) {
  RunSpec spec, again;
  {
    const ConfigFolder folder(
        "{\"model_type\": \"mixtral\", \"hidden_size\": 64, \"architectures\": [\"M \\\"q\\\"\"]}");
    spec = parse_run_spec(kRest, "r.toml", {"model.hf=" + folder.path()});
    EXPECT_EQ(spec.model_hf, folder.path());
    EXPECT_THAT(error_text(ErrorKind::usage, [&] { parse({"model.hf=" + folder.path()}); }),
                HasSubstr("model.head_dim and model.hf (--set) both give the model; keep one"));
  }
  EXPECT_EQ(spec.model.hidden_size, 64);
  EXPECT_EQ(spec.provenance.at("model.hidden_size"), "config.json");
  EXPECT_EQ(spec.provenance.at("model.vocab_size"), "default");
  EXPECT_EQ(spec.model.source->at("architectures"), json{"M \"q\""});
  for (const bool with_provenance : {false, true}) {
    again = read_back(spec, with_provenance);  // the folder is gone
    EXPECT_EQ(without_provenance(again), without_provenance(spec));
  }
  EXPECT_THAT(to_toml(spec, true), HasSubstr("# hidden_size = 64 "));
  EXPECT_THAT(config_diff(spec, again), ElementsAre());
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec("[model]\nconfig = \"{\"", "r.toml", {}); }),
              HasSubstr("r.toml:2: model.config must be the text of a JSON object; got \"{\""));
  EXPECT_THAT(error_text(ErrorKind::usage, [] { parse_run_spec("[model]\nconfig = \"{}\"", "r.toml", {}); }),
              HasSubstr("r.toml:2: model.config: model_type must be one of"));
}

TEST(Provenance, GivesTheOriginOfEachValue) {
  const RunSpec spec = parse({"train.steps=8", "model.first_k_dense_replace=1", "model.intermediate_size=5"});
  EXPECT_EQ(spec.provenance.at("train.steps"), "--set");
  EXPECT_EQ(spec.provenance.at("train.seq_len"), "r.toml:15");
  EXPECT_EQ(spec.provenance.at("model.vocab_size"), "r.toml:2");
  EXPECT_EQ(spec.provenance.at("model.moe_layer_freq"), "--set");  // by another key for the same property
  EXPECT_EQ(spec.provenance.at("optimizer.beta1"), "default");
  const std::string text = to_toml(spec, true);
  EXPECT_THAT(text, testing::ContainsRegex("steps = 8 +# from --set\n"));
  EXPECT_THAT(text, testing::ContainsRegex("beta1 = 0.9 +# default\n"));
  EXPECT_THAT(to_toml(spec, false), testing::Not(HasSubstr("#")));
}

}  // namespace
}  // namespace moebius

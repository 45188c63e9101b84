// `moebius config`: what would run, its size, its memory and where each value comes from.
#include <fmt/core.h>

#include <filesystem>

#include "comm/transport/mpi.h"
#include "device/accelerator.h"
#include "device/gpus_found.h"
#include "io/json_text.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/gemm/cublas_lt.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

const std::string kRecipe = MOEBIUS_SOURCE_DIR "/recipes/demo.toml";

TEST(CliConfig, PrintsSizeMeshMemoryAndProvenance) {
  TestDir dir;
  const auto json = json_of(run_moebius(dir, {"config", kRecipe, "--set", "train.steps=77", "--json"}));
  EXPECT_EQ(json.at("provenance").at("train.steps"), "--set");
  EXPECT_THAT(json.at("recipe").get<std::string>(), testing::HasSubstr("steps = 77"));
  EXPECT_GT(json.at("parameters").get<int64_t>(), json.at("active_parameters").get<int64_t>());
  EXPECT_EQ(json.at("mesh").at("dp"), 1);
  int64_t total = 0;
  for (const auto& [life, bytes] : json.at("memory_bytes").items()) total += life == "total" ? 0 : bytes.get<int64_t>();
  EXPECT_EQ(total, json.at("memory_bytes").at("total").get<int64_t>());
  // f32 masters and two moments of every parameter, apart from alignment.
  EXPECT_GE(json.at("memory_bytes").at("optimizer").get<int64_t>(), 8 * json.at("parameters").get<int64_t>());
}

TEST(CliConfig, PrintsBytesPerParameter) {
  TestDir dir;
  const auto text = [&](std::vector<std::string> overrides) {
    std::vector<std::string> words{"config", kRecipe, "--set", "precision.compute=bf16"};
    for (const std::string& o : overrides) words.insert(words.end(), {"--set", o});
    return run_moebius(dir, words).out;
  };
  EXPECT_THAT(text({}),
              testing::HasSubstr("\n# parameter  18 bytes: weight 2 and gradient 4, and on the rank that owns "
                                 "it master 4 and state 8\n"));
  EXPECT_THAT(
      text({"optimizer.master=bf16_remainder", "optimizer.state=bf16"}),
      testing::HasSubstr("# parameter  12 bytes: weight 2 and gradient 4, and on the rank that owns it master 2 "
                         "and state 4\n"));
  EXPECT_THAT(text({"optimizer.master=bf16_stochastic", "optimizer.name=sgd", "optimizer.momentum=0"}),
              testing::HasSubstr("# parameter  6 bytes: "));
  EXPECT_THAT(text({"optimizer.offload=true", "checkpoint.async=false"}),
              testing::HasSubstr("state 8; master and state are in host memory\n"));
  // Rows of 128 elements have no blocks of 256.
  EXPECT_THAT(text({"optimizer.state=8bit"}),
              testing::AllOf(testing::HasSubstr("# parameter  18 bytes: "),
                             testing::HasSubstr("# note       optimizer.state = \"8bit\" keeps moments of 100 % of the "
                                                "parameters in f32, since their rows are not a multiple of 256")));
  EXPECT_THAT(text({"optimizer.state=8bit", "model.hidden_size=256", "model.moe_intermediate_size=256",
                    "model.shared_expert_intermediate_size=256", "model.head_dim=64"}),
              testing::AllOf(testing::HasSubstr(" and state 2.0"), testing::Not(testing::HasSubstr("keeps moments"))));
  const std::vector<std::string> sums_on_host{"optimizer.grad=bf16", "optimizer.offload_grad=true"};
  EXPECT_THAT(text(sums_on_host), testing::HasSubstr("state 8; the gradient is in host memory\n"));
  const std::string offload = "optimizer.offload=true", not_async = "checkpoint.async=false";
  EXPECT_THAT(text({offload, not_async, "optimizer.offload_buffer=0.001"}),
              testing::HasSubstr("state 8; master and state are in host memory, except 0.001 GiB of master and state "
                                 "(optimizer.offload_buffer) on the GPU\n"));
  EXPECT_THAT(text({offload, not_async, "optimizer.offload_buffer=0.5"}), testing::HasSubstr("master 4 and state 8\n"))
      << "all are on the GPU";
  EXPECT_THAT(text({offload, not_async, "optimizer.offload_buffer=0.5", sums_on_host[0], sums_on_host[1]}),
              testing::HasSubstr("state 8; the gradient is in host memory\n"));
  const auto json = json_of(run_moebius(dir, {"config", kRecipe, "--set", "precision.compute=f32", "--json"}));
  EXPECT_EQ(json.at("parameter_bytes").at("master"), 0);
  EXPECT_EQ(json.at("parameter_bytes").at("state"), 8);
}

TEST(CliConfig, PrintsWhetherItFitsAndWhatIsMissingToTrain) {
  TestDir dir;
  const Ran ran = run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml"});
  EXPECT_THAT(ran.out, testing::ContainsRegex("\n# fits       yes: [0-9.]+ MiB are needed, [0-9.]+ .iB are available"));
  EXPECT_THAT(ran.out,
              testing::HasSubstr("\n# to train   no dataset at runs/tiny_cpu/data/train (.bin and .idx); moebius "
                                 "data build --input FILE... --tokenizer bytes --out runs/tiny_cpu/data/train"));
  EXPECT_THAT(ran.out, testing::HasSubstr("\n# data       128 tokens per step, 2560 in 20 steps\n"));
  EXPECT_THAT(ran.out, testing::HasSubstr("\n# export     no: model_type \"moebius\" is Moebius' own"));
  const Ran large = run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/mixtral_8x7b.toml"});
  EXPECT_THAT(large.out, testing::ContainsRegex("\n# fits       no: [0-9.]+ GiB are needed"));
  EXPECT_THAT(large.out, testing::HasSubstr("\n# to train   run.dir must be given"));
  EXPECT_THAT(large.out, testing::HasSubstr("\n# export     to Hugging Face as mixtral\n"));
  EXPECT_THAT(large.out, testing::HasSubstr("\n# model      46.70 B parameters, 12.88 B active"));
  const auto json = json_of(run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/mixtral_8x7b.toml", "--json"}));
  EXPECT_EQ(json.at("memory_verdict").at("fits"), false);
  EXPECT_EQ(json.at("missing_to_train").size(), 1u);
}

// Each thing that `train` refuses at once is a line of `config`, which still plans the memory.
TEST(CliConfig, PrintsWhatTrainWouldRefuse) {
  TestDir dir;
  write_file_atomic(dir.path("text.txt"), std::string(1000, 'a'));
  ASSERT_EQ(run_moebius(dir, {"data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "set"}).code, 0);
  const auto missing = [&](const std::vector<std::string>& sets) {
    std::vector<std::string> args{"config", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--json", "--set",
                                  "data.train=[\"set\"]"};
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    const Ran ran = run_moebius(dir, args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return json_of(ran).at("missing_to_train").dump();
  };
  EXPECT_EQ(missing({}), "[]");
  EXPECT_THAT(missing({"data.tokenizer=nodir"}),
              testing::HasSubstr("data.tokenizer must be \\\"bytes\\\" or a folder with a tokenizer.json"));
  EXPECT_THAT(missing({"data.tokenizer=" MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/qwen2"}),
              testing::HasSubstr("data.tokenizer: set: expected the tokenizer that built the dataset"));
  EXPECT_THAT(
      missing({"model.vocab_size=200"}),
      testing::HasSubstr("model.vocab_size: set: expected token ids in [0, 200), the model's vocabulary; got 256"));
  EXPECT_THAT(missing({"model.init_from=nodir"}), testing::HasSubstr("model nodir: expected a folder"));
}

// Shows how often a run reads its data: 2560 tokens, from a text of 1000 bytes and its end.
TEST(CliConfig, PrintsHowOftenDataIsRead) {
  TestDir dir;
  write_file_atomic(dir.path("text.txt"), std::string(1000, 'a'));
  ASSERT_EQ(run_moebius(dir, {"data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "set"}).code, 0);
  const Ran ran =
      run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--set", "data.train=[\"set\"]"});
  EXPECT_THAT(ran.out, testing::HasSubstr("\n# data       set: 1001 tokens, read 2.56 times\n"));
  EXPECT_THAT(ran.out, testing::Not(testing::HasSubstr("# to train")));
  // Whole documents do not fill every sequence.
  write_file_atomic(dir.path("pairs.jsonl"), R"({"prompt": "ab", "completion": "c"})");
  ASSERT_EQ(
      run_moebius(dir, {"data", "build", "--input", "pairs.jsonl", "--tokenizer", "bytes", "--out", "pairs"}).code, 0);
  EXPECT_THAT(run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--set",
                                "data.train=[\"pairs\"]", "--set", "data.separate_documents=true"})
                  .out,
              testing::HasSubstr("\n# data       pairs: 4 tokens, read at most 640 times\n"));
}

TEST(CliConfig, PrintsChangedValuesAloneAndAllKeys) {
  TestDir dir;
  const Ran ran = run_moebius(dir, {"config", kRecipe, "--changed", "--set", "train.steps=77"});
  EXPECT_THAT(ran.out, testing::ContainsRegex("\nsteps = 77 +# from --set\n"));
  EXPECT_THAT(ran.out, testing::Not(testing::HasSubstr("# default")));
  write_file_atomic(dir.path("again.toml"), ran.out);
  EXPECT_EQ(json_of(run_moebius(dir, {"config", "again.toml", "--json"})).at("recipe"),
            json_of(run_moebius(dir, {"config", kRecipe, "--set", "train.steps=77", "--json"})).at("recipe"));
  EXPECT_EQ(run_moebius(dir, {"config", "--keys"}).out, read_file(MOEBIUS_SOURCE_DIR "/docs/reference/recipe.md"));
  EXPECT_EQ(json_of(run_moebius(dir, {"config", "--keys", "--json"})).at("keys")[0].at("key"), "run.dir");
  expect_refused(run_moebius(dir, {"config"}), 2, "config: expected a recipe, or --keys");
}

// A machine without a GPU predicts the memory of a run on one. The model has 5.61 B parameters,
// bf16 with f32 masters, gradients and moments.
TEST(CliConfig, PredictsGpuMemoryWithoutAGpu) {
  TestDir dir;
  const auto json =
      json_of(run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/bench_qwen3_30b_a3b_8layers.toml", "--json"}));
  EXPECT_EQ(json.at("memory_scratch_of"), "cuda");
  EXPECT_EQ(json.at("memory_cudnn"), has_cudnn());
  const double bytes = json.at("memory_bytes").at("total").get<double>();
  EXPECT_GT(bytes, 18.0 * json.at("parameters").get<double>());
  EXPECT_LT(bytes, 140e9);
  // Beside the plan, the report has the copies of an asynchronous checkpoint, and for a GPU all
  // memory that a run holds.
  const auto& beside = json.at("memory_beside_bytes");
  EXPECT_NEAR(beside.at("checkpoint_snapshot").get<double>(), 12.0 * json.at("parameters").get<double>(), 1e6);
  EXPECT_GT(beside.at("host_pinned"), 0);
  EXPECT_GE(beside.at("gpu_predicted_peak").get<double>(),
            bytes + beside.at("gpu_workspaces").get<double>() + beside.at("gpu_kernels").get<double>());
}

// With activations on the host the rank with the largest plan is not the one that needs most of its GPU.
TEST(CliConfig, PrintsTheRankThatNeedsMostOfItsGpu) {
  TestDir dir;
  const auto json = json_of(run_moebius(
      dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/deepseek_v3_256_gpus.toml", "--ranks", "256", "--set",
            "optimizer.state=8bit", "--set", "optimizer.master=bf16_stochastic", "--set", "optimizer.grad=bf16",
            "--set", "memory.recompute=auto", "--set", "memory.fit=80GiB", "--json"}));
  const std::string fit = json.at("memory_fit");
  EXPECT_THAT(fit, testing::HasSubstr(", memory.offload = ["));
  const double gib = json.at("memory_beside_bytes").at("gpu_predicted_peak").get<double>() / (1 << 30);
  EXPECT_THAT(fit, testing::HasSubstr(fmt::format(": a rank needs {:.2f} GiB of memory.fit = 80GiB", gib)));
  EXPECT_EQ(json.at("provenance").at("memory.recompute"), "memory.fit");
}

// States on the host get the memory that memory.fit leaves.
nlohmann::json config_of_states_on_host(const TestDir& dir, const std::vector<std::string>& more) {
  std::vector<std::string> words{"config",
                                 MOEBIUS_SOURCE_DIR "/recipes/bench_qwen3_30b_a3b_8layers.toml",
                                 "--json",
                                 "--set",
                                 "optimizer.offload=true",
                                 "--set",
                                 "checkpoint.async=false"};
  for (const std::string& each : more) words.insert(words.end(), {"--set", each});
  return json_of(run_moebius(dir, words));
}

int64_t predicted_peak(const nlohmann::json& json) {
  return json.at("memory_beside_bytes").at("gpu_predicted_peak").get<int64_t>();
}

TEST(CliConfig, PrintsTheBufferOfStates) {
  TestDir dir;
  const auto json = [&](const std::vector<std::string>& more) { return config_of_states_on_host(dir, more); };
  const auto peak = predicted_peak;
  const auto none = json({"optimizer.offload_buffer=0"}), fit = json({"memory.fit=100GiB"});
  EXPECT_THAT(fit.at("recipe"), testing::ContainsRegex("offload_buffer = [1-9][0-9]*[.][0-9]+\n"));
  EXPECT_EQ(fit.at("provenance").at("optimizer.offload_buffer"), "memory.fit");
  EXPECT_THAT(fit.at("memory_fit"), testing::HasSubstr(", optimizer.offload_buffer = "));
  EXPECT_GT(peak(fit), peak(none) + (int64_t{1} << 30));
  EXPECT_LE(peak(fit), int64_t{100} << 30);
  EXPECT_GT(none.at("memory_beside_bytes").at("host_pinned"), fit.at("memory_beside_bytes").at("host_pinned"));
}

TEST(CliConfig, SaysThatTheBufferOfStatesNeedsAGpuOrAFit) {
  if (Accelerator::count() > 0) GTEST_SKIP() << "this machine has a GPU, for which the buffer is chosen";
  TestDir dir;
  const auto unknown = config_of_states_on_host(dir, {});
  EXPECT_THAT(unknown.at("recipe"), testing::HasSubstr("offload_buffer = \"auto\"\n"));
  EXPECT_THAT(unknown.at("notes").dump(),
              testing::HasSubstr("counts as 0 here, since the memory of the GPU is not known"));
  EXPECT_EQ(predicted_peak(unknown), predicted_peak(config_of_states_on_host(dir, {"optimizer.offload_buffer=0"})));
}

// Sharded layers take less memory of each rank, and so does each of the two keys by itself.
TEST(CliConfig, ShowsThatShardedLayersTakeLess) {
  TestDir dir;
  const auto bytes = [&](const std::vector<std::string>& sets) {
    std::vector<std::string> words{"config", MOEBIUS_SOURCE_DIR "/recipes/bench_olmoe_1b_7b.toml", "--ranks", "8",
                                   "--json"};
    for (const std::string& each : sets) words.insert(words.end(), {"--set", each});
    return json_of(run_moebius(dir, words)).at("memory_bytes");
  };
  const std::string graph = "run.graph=false", fsdp = "parallel.fsdp=true", gradients = "parallel.shard_gradients=true";
  const auto whole = bytes({graph}), weights = bytes({graph, fsdp}), sums = bytes({graph, gradients}),
             both = bytes({graph, fsdp, gradients});
  const auto of = [](const nlohmann::json& lives, const char* life) { return lives.at(life).get<double>(); };
  EXPECT_LT(of(weights, "param"), 0.3 * of(whole, "param"));
  EXPECT_EQ(of(weights, "grad"), of(whole, "grad"));
  EXPECT_EQ(of(sums, "param"), of(whole, "param"));
  EXPECT_LT(of(sums, "grad"), 0.3 * of(whole, "grad"));
  EXPECT_EQ(of(both, "param"), of(weights, "param"));
  EXPECT_EQ(of(both, "grad"), of(sums, "grad"));
  EXPECT_LT(of(weights, "total"), of(whole, "total"));
  EXPECT_LT(of(sums, "total"), of(whole, "total"));
  EXPECT_LT(of(both, "total"), of(sums, "total"));
}

// On CPUs the ranks of one machine need its memory together.
TEST(CliConfig, CountsTheCpuRanksOfAMachine) {
  TestDir dir;
  const auto verdict = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{
        "config", kRecipe, "--json", "--ranks", "4", "--set", "run.threads=1", "--set", "train.micro_batch=4"};
    words.insert(words.end(), more.begin(), more.end());
    return json_of(run_moebius(dir, words)).at("memory_verdict");
  };
  const auto all = verdict({}), half = verdict({"--ranks-per-machine", "2"});
  EXPECT_THAT(all.at("text").get<std::string>(), testing::HasSubstr(" are needed by 4 ranks, "));
  EXPECT_THAT(half.at("text").get<std::string>(), testing::HasSubstr(" are needed by the 2 ranks of a machine, "));
  EXPECT_EQ(all.at("needed_bytes"), 2 * half.at("needed_bytes").get<int64_t>());
}

// The sum is the one that `train` compares when it starts. Keys that do less than they say are noted.
TEST(CliConfig, SumsWhatAMachinePinsAndNotesIdleKeys) {
  TestDir dir;
  const auto config = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"config",  MOEBIUS_SOURCE_DIR "/recipes/bench_olmoe_1b_7b.toml",
                                   "--ranks", "4",
                                   "--set",   "optimizer.offload=true"};
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir, words);
  };
  const auto verdict = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"--json"};
    words.insert(words.end(), more.begin(), more.end());
    return json_of(config(words)).at("memory_verdict").at("text").get<std::string>();
  };
  EXPECT_THAT(verdict({}),
              testing::ContainsRegex("; the 4 ranks of a machine \\(--ranks-per-machine\\) pin [0-9.]+ GiB "
                                     "of the memory of their host together, and [0-9.]+ .iB are available"));
  EXPECT_THAT(verdict({"--ranks-per-machine", "2"}), testing::HasSubstr("; the 2 ranks of a machine"));
  EXPECT_THAT(verdict({"--ranks-per-machine", "1"}), testing::HasSubstr(" of the memory of its host are pinned"));
  // Masters and moments of 413 B parameters, 5 TB, are more than any machine of these tests has.
  const auto large = json_of(run_moebius(dir, {"config", MOEBIUS_SOURCE_DIR "/recipes/bench_olmoe_1b_7b.toml", "--json",
                                               "--set", "optimizer.offload=true", "--set", "checkpoint.async=false",
                                               "--set", "model.moe_intermediate_size=65536"}))
                         .at("memory_verdict");
  EXPECT_THAT(large.at("text").get<std::string>(), testing::HasSubstr(": this host has too little memory for it"));
  EXPECT_FALSE(large.at("fits"));
  const std::vector<std::string> idle{"--set", "parallel.fsdp=true", "--set", "run.graph=false",
                                      "--set", "parallel.pp=4"};
  EXPECT_THAT(config(idle).out, testing::HasSubstr("\n# note       parallel.fsdp = true shards nothing: no two ranks "
                                                   "hold the same weights of a layer (dp * cp = 1, edp = 1);"));
  EXPECT_THAT(
      config({"--set", "parallel.ep=2", "--set", "parallel.expert_overlap=batch_split"}).out,
      testing::HasSubstr("\n# note       parallel.expert_overlap = \"batch_split\" in bf16 needs the kernels of "
                         "a GPU of compute capability 9.0;"));
}

// Shows the place of each rank, the traffic of each group, and whose memory is shown. The last
// stage has the head.
TEST(CliConfig, PrintsTheLayoutTable) {
  TestDir dir;
  const auto config = [&](const std::string& ranks, const std::vector<std::string>& more = {}) {
    std::vector<std::string> words{"config", kRecipe, "--ranks", ranks};
    for (const char* each : {"parallel.tp=2", "parallel.pp=2", "parallel.ep=4", "train.micro_batch=4"})
      words.insert(words.end(), {"--set", each});
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir, words);
  };
  const Ran ran = config("8");
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.out, testing::HasSubstr("\n# 8 ranks: dense tp 2 x cp 1 x dp 2 x pp 2, "
                                          "experts etp 1 x ep 4 x edp 1 x pp 2\n"));
  EXPECT_THAT(ran.out, testing::HasSubstr("\n#      7     1   0   1   1     0   3   0\n"));
  EXPECT_THAT(ran.out, testing::HasSubstr("\n# ep              4      2  0 1 2 3                   "
                                          "the experts of one layer"));
  EXPECT_THAT(ran.out, testing::ContainsRegex("\n# memory     of rank [15], which needs the most\n"));
  const auto json = json_of(config("8", {"--json"}));
  EXPECT_EQ(json.at("mesh").at("ep"), 4);
  EXPECT_EQ(json.at("mesh").at("dp"), 2);
  EXPECT_EQ(
      json.at("groups").at("ep"),
      (nlohmann::json{{"size", 4}, {"groups", 2}, {"carries", "the experts of one layer: dispatch and combine"}}));
  expect_refused(config("7"), 2, "tp * cp * pp = 2 * 1 * 2; got 7;");
}

// On several machines `auto` compares times, by usual rates or by those of a machine file.
TEST(CliConfig, ComparesDispatchersOverMachines) {
  TestDir dir;
  const auto config = [&](const std::vector<std::string>& options, bool json) {
    std::vector<std::string> words{"config", MOEBIUS_SOURCE_DIR "/recipes/bench_olmoe_1b_7b.toml", "--ranks", "16"};
    words.insert(words.end(), options.begin(), options.end());
    for (const char* each : {"parallel.ep=16", "train.global_batch=64", "optimizer.offload=false"})
      words.insert(words.end(), {"--set", each});
    if (json) words.emplace_back("--json");
    return run_moebius(dir, words);
  };
  const auto usual = json_of(config({}, true)), named = json_of(config({"--machine", "h200"}, true));
  EXPECT_EQ(usual.at("dispatcher"), "two_level");
  EXPECT_THAT(
      usual.at("dispatcher_reason").get<std::string>(),
      testing::ContainsRegex(
          "on 2 nodes of 8 \\(parallel.ranks_per_node\\), where it is predicted to be the fastest: two-level [0-9.]+ ms "
          "\\([0-9.]+ MB across nodes and [0-9.]+ MB inside\\) to exchange the rows of a layer and micro-batch, against "
          "all-gather .*; rates: 40 GB/s across nodes and 299 GB/s inside, the usual ones of GPUs; `moebius bench "
          "machine` writes a file with the rates of this machine, and --machine names it"));
  const auto &estimates = usual.at("dispatcher_estimates"), &by_file = named.at("dispatcher_estimates");
  EXPECT_GT(estimates.at("allgather").at("seconds").get<double>(),
            1.1 * estimates.at("two_level").at("seconds").get<double>());
  EXPECT_EQ(by_file.at("two_level").at("across_bytes"), estimates.at("two_level").at("across_bytes"));
  EXPECT_THAT(by_file.at("rates").get<std::string>(),
              testing::HasSubstr("GB/s inside, those of the machine file \"NVIDIA H200\""));
  expect_refused(config({"--machine", "xeon2"}, false), 2,
                 "--machine xeon2: expected a machine file with device = \"cuda\", as run.device; got \"cpu\"; "
                 "name another file, or leave --machine out");
  EXPECT_THAT(config({"--machine", "h200"}, false).out, testing::Not(testing::HasSubstr("have no effect")));
  EXPECT_THAT(config({"--machine", "h200", "--set", "parallel.dispatcher=allgather"}, false).out,
              testing::HasSubstr("# --machine h200: its rates have no effect here"));
  expect_refused(config({"--machine", "nowhere"}, false), 2, "no machine is called \"nowhere\"");
}

// The dispatcher that will run, and why: for a recipe without ep, for `auto` on both sides of top-k
// = 2, and under CUDA graphs.
TEST(CliConfig, NamesTheDispatcherAndWhy) {
  TestDir dir;
  std::string ranks_per_machine = "1";
  std::vector<std::string> options;
  const auto config = [&](const std::vector<std::string>& sets, bool json) {
    std::vector<std::string> words{
        "config", kRecipe, "--ranks", "4", "--ranks-per-machine", ranks_per_machine, "--set", "train.micro_batch=4"};
    words.insert(words.end(), options.begin(), options.end());
    for (const std::string& each : sets) words.insert(words.end(), {"--set", each});
    if (json) words.emplace_back("--json");
    return run_moebius(dir, words);
  };
  const auto choice = [&](const std::vector<std::string>& sets) {
    const auto json = json_of(config(sets, true));
    const std::string name = json.at("dispatcher"), reason = json.at("dispatcher_reason");
    EXPECT_THAT(config(sets, false).out, testing::HasSubstr("\n# dispatcher " + name + ": " + reason + "\n"));
    return name + ": " + reason;
  };
  const auto apart = [](int sharing) {
    return fmt::format(
        "; direct would send the least, but the {} ranks that share experts are not on one machine "
        "(--ranks-per-machine 1)",
        sharing);
  };
  EXPECT_EQ(choice({}), "local: each rank holds all experts of its layers (parallel.ep * etp = 1)");
  EXPECT_EQ(choice({"parallel.ep=2"}),
            "allgather: chosen by \"auto\" because parallel.ep = 2 is at most top-k = 2, so that it sends no more than "
            "all-to-all" +
                apart(2));
  EXPECT_EQ(choice({"parallel.ep=4"}),
            "alltoall: chosen by \"auto\" because parallel.ep = 4 is above top-k = 2, so that it sends less than "
            "all-gather" +
                apart(4));
  EXPECT_EQ(choice({"parallel.ep=4", "run.device=cuda"}),
            "allgather: chosen by \"auto\" because run.graph is on and all-to-all cannot be captured in CUDA graphs; "
            "with run.graph = false \"auto\" is all-to-all, which sends less (parallel.ep = 4, top-k = 2)" +
                apart(4));
  EXPECT_EQ(choice({"parallel.ep=4", "parallel.dispatcher=allgather"}), "allgather: parallel.dispatcher asks for it");
  expect_refused(config({"parallel.ep=4", "parallel.dispatcher=alltoall", "run.device=cuda"}, false), 2,
                 "parallel.dispatcher = \"alltoall\" reads its counts on the host");
  ranks_per_machine = "2";
  // All-to-all sends fewer bytes inside nodes, and few more across them. Slow links across nodes turn the choice.
  EXPECT_THAT(choice({"parallel.ep=4"}), testing::StartsWith("alltoall: "));
  const std::vector<std::string> nodes{"parallel.ep=4", "parallel.ranks_per_node=2", "precision.compute=f32"};
  EXPECT_THAT(choice(nodes),
              testing::StartsWith("alltoall: chosen by \"auto\" because the ranks that share experts are "
                                  "on 2 nodes of 2 (parallel.ranks_per_node), where it is predicted to "
                                  "be the fastest: all-to-all "));
  EXPECT_THAT(choice({"parallel.ep=4", "parallel.ranks_per_node=2", "run.device=cuda"}),
              testing::AllOf(testing::StartsWith("two_level: "),
                             testing::HasSubstr("where it is predicted to be the fastest: two-level "),
                             testing::HasSubstr(", against all-gather ")));
  options = {"--machine", "xeon2"};
  EXPECT_THAT(choice(nodes), testing::AllOf(testing::StartsWith("two_level: "),
                                            testing::HasSubstr("rates: 0.8 GB/s across nodes and 16 GB/s inside, those "
                                                               "of the machine file \"two cores of an Intel Xeon"),
                                            testing::EndsWith(", whose links.across_gb_s is assumed")));
  options = {};
  EXPECT_EQ(choice({"parallel.ep=4", "parallel.ranks_per_node=2", "parallel.dispatcher=two_level"}),
            "two_level: parallel.dispatcher asks for it");
  expect_refused(config({"parallel.ep=4", "parallel.dispatcher=two_level"}, false), 2,
                 "parallel.dispatcher = \"two_level\": the ep * etp = 4 * 1 ranks that share experts must be on two or "
                 "more whole nodes of parallel.ranks_per_node = 8 ranks");
  ranks_per_machine = "3";
  EXPECT_THAT(choice({"parallel.ep=4", "parallel.ranks_per_node=2"}), testing::StartsWith("alltoall: "));
  ranks_per_machine = "2";
  EXPECT_EQ(choice({"parallel.ep=2"}),
            "direct: chosen by \"auto\" because the 2 ranks that share experts are on one machine (--ranks-per-machine "
            "2): a token is written once to each rank that has any of its experts, which sends the least "
            "(0.786 rows per token with balanced routing, 1 with all-gather, 1 with all-to-all)");
  ranks_per_machine = "0";
  expect_refused(config({}, false), 2, "--ranks-per-machine: expected at least 1; got 0");
}

TEST(CliConfig, OutputIsAValidRecipe) {
  TestDir dir;
  const Ran first = run_moebius(dir, {"config", kRecipe});
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_THAT(first.out, testing::HasSubstr("memory plan"));
  write_file_atomic(dir.path("again.toml"), first.out);
  EXPECT_EQ(json_of(run_moebius(dir, {"config", "again.toml", "--json"})).at("recipe"),
            json_of(run_moebius(dir, {"config", kRecipe, "--json"})).at("recipe"));
}

TEST(CliConfig, RefusesBadRecipes) {
  TestDir dir;
  expect_refused(run_moebius(dir, {"config", kRecipe, "--set", "train.stpes=3"}), 2, "train.steps");
  expect_refused(run_moebius(dir, {"config", kRecipe, "--set", "train.steps=\"many\""}), 2, "train.steps");
  expect_refused(run_moebius(dir, {"config", kRecipe, "--ranks", "0"}), 2, "--ranks: expected at least 1; got 0");
  const Ran missing = run_moebius(dir, {"config", "none.toml"});
  EXPECT_NE(missing.code, 0);
  EXPECT_THAT(missing.err, testing::HasSubstr("none.toml"));
}

// Shapes that a device's kernels do not support are refused as in a run, on any machine and
// in any build.
TEST(CliConfig, RefusesShapesThatKernelsDoNotSupport) {
  TestDir dir;
  const auto config = [&](const std::string& set) {
    return run_moebius(dir, {"config", kRecipe, "--set", "run.device=cuda", "--set", set});
  };
  expect_refused(config("model.hidden_size=20000"), 2,
                 "norms have kernels for rows of at most 16384; got model.hidden_size = 20000; set run.device");
  expect_refused(config("model.head_dim=512"), 2,
                 "heads of at most 256; got model.head_dim = 512; set run.device = \"cpu\"");
  expect_refused(run_moebius(dir, {"config", kRecipe, "--set", "model.num_experts=2000"}), 2,
                 "model.num_experts: the router has kernels for at most 1024 experts; got 2000; use fewer");
}

}  // namespace
}  // namespace moebius

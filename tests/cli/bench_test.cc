// The workloads of `moebius bench` as a user runs them.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "device/accelerator.h"
#include "tests/built.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

TEST(CliBench, UnknownNamesAreListed) {
  TestDir dir;
  expect_refused(
      run_moebius(dir, {"bench", "warp"}), 2,
      "bench: expected attention, experts, gemm, moe-layer, dispatch, announce, collectives, step, precision or machine; got \"warp\"");
  expect_refused(run_moebius(dir, {"bench", "gemm", "--runs", "0"}), 2,
                 "--runs: expected at least 1; got 0; leave it out for the default");
}

TEST(CliBench, DispatchReportsSentBytes) {
  TestDir dir;
  const auto json = json_of(run_moebius(dir, {"bench", "dispatch", "--ranks", "2", "--dispatcher", "alltoall",
                                              "--threads", "1", "--runs", "1", "--json"}));
  EXPECT_EQ(json.at("axis"), "ep");
  EXPECT_EQ(json.at("routing"), "balanced");
  EXPECT_EQ(json.at("dispatcher"), "alltoall");
  // 4096 tokens go to 2 experts each, half of them on another rank, with 512 numbers of 2 bytes.
  EXPECT_EQ(json.at("lines").at(1).at("sent_bytes"), 4096 * 2 / 2 * 512 * 2);
  EXPECT_EQ(json.at("lines").at(1).at("expected_bytes"), 4096 * 2 / 2 * 512 * 2);
  const auto alone = json_of(run_moebius(dir, {"bench", "dispatch", "--runs", "1", "--json"}));
  EXPECT_GT(alone.at("copy_gbytes_per_s"), 0);
  const auto direct = json_of(run_moebius(
      dir, {"bench", "dispatch", "--ranks", "2", "--dispatcher", "direct", "--threads", "1", "--runs", "1", "--json"}));
  EXPECT_GT(direct.at("times_slower_than_copy"), 0);
}

TEST(CliBench, AnnouncePrintsTheTimeOfEveryOp) {
  TestDir dir;
  const std::vector<std::string> words{"bench", "announce", "--ranks", "4", "--sequences", "1", "--runs", "1"};
  std::vector<std::string> as_json = words;
  as_json.emplace_back("--json");
  const auto json = json_of(run_moebius(dir, as_json));
  EXPECT_EQ(json.at("ranks"), 4);
  EXPECT_EQ(json.at("tokens_of_a_rank"), 512);
  EXPECT_EQ(json.at("lines").at(0).at("name"), "announce");
  EXPECT_GT(json.at("lines").at(0).at("us"), 0);
  EXPECT_THAT(run_moebius(dir, words).out, testing::ContainsRegex("\nop of rank 0 +us\nannounce +[0-9.]+\n"));
}

TEST(CliBench, DispatchCountsBytesAcrossNodesApart) {
  TestDir dir;
  const std::vector<std::string> words{"bench",     "dispatch", "--ranks", "4", "--ranks-per-node", "2",
                                       "--threads", "1",        "--runs",  "1", "--dispatcher",     "two_level"};
  std::vector<std::string> as_json = words;
  as_json.emplace_back("--json");
  const auto json = json_of(run_moebius(dir, as_json));
  EXPECT_EQ(json.at("dispatcher"), "two_level");
  EXPECT_EQ(json.at("nodes"), 2);
  for (const auto& line : json.at("lines")) {
    EXPECT_EQ(line.at("across_bytes"), line.at("across_route_bytes"));
    EXPECT_EQ(line.at("sent_bytes").get<double>(),
              line.at("across_bytes").get<double>() + line.at("inside_bytes").get<double>());
  }
  EXPECT_THAT(run_moebius(dir, words).out,
              testing::ContainsRegex("\n2 nodes +sent across +of this route +sent inside\n"));
  expect_refused(run_moebius(dir, {"bench", "dispatch", "--ranks", "4", "--dispatcher", "two_level"}), 2,
                 "parallel.dispatcher = \"two_level\": the ep * etp = 4 * 1 ranks that share experts must be on two or "
                 "more whole nodes of parallel.ranks_per_node = 8 ranks");
}

// bench/generation.py writes a model of a Hugging Face type, and times its texts.
TEST(CliBench, GenerationReportsTheBandwidthLimit) {
  if (std::string(MOEBIUS_PYTHON).empty()) GTEST_SKIP() << "needs Python";
  const TestDir dir;
  std::string command = quoted(MOEBIUS_PYTHON) + " " + quoted(MOEBIUS_SOURCE_DIR "/bench/generation.py") +
                        " --moebius " + quoted(built_program("moebius")) + " --keep " + quoted(dir.path("model")) +
                        " --layers 1 --texts 2 --tokens 2 202 --bandwidth 10 --threads 1 --json";
  for (const char* set : {"hidden_size=64", "head_dim=32", "num_attention_heads=2", "num_key_value_heads=1",
                          "vocab_size=320", "num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=16"})
    command += fmt::format(" --set {}", set);
  ASSERT_EQ(std::system((command + " > " + quoted(dir.path("out"))).c_str()), 0);
  const auto result = nlohmann::json::parse(read_file(dir.path("out"))).at("results").at(0);
  // Head, norms, attention and router; and 3 of 4 experts, which two tokens choose on average.
  const int64_t dense = 320 * 64 + 3 * 64 + 2 * 32 + 64 * (64 + 32 + 32 + 64) + 4 * 64, expert = 3 * 64 * 16;
  EXPECT_EQ(result.at("read_bytes"), 2.0 * static_cast<double>(dense + 3 * expert));
  EXPECT_DOUBLE_EQ(result.at("limit_tokens_per_s"), 2 * 10e9 / result.at("read_bytes").get<double>());
  EXPECT_GT(result.at("tokens_per_s"), 0);
  EXPECT_FALSE(std::filesystem::exists(dir.path("model/prompts.txt")));
  EXPECT_NE(std::system((command + " --layers 2 2> " + quoted(dir.path("err"))).c_str()), 0);
  EXPECT_THAT(read_file(dir.path("err")), testing::HasSubstr("expected a model of these sizes; got another"));
}

TEST(CliBench, AStepOfATinyModel) {
  TestDir dir;
  const auto json = json_of(run_moebius(
      dir, {"bench", "step", "--recipe", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--set", "train.global_batch=2",
            "--set", "train.micro_batch=1", "--set", "train.seq_len=16", "--steps", "2", "--profile", "--json"}));
  EXPECT_GT(json.at("tokens_per_s").get<double>(), 0);
  EXPECT_EQ(json.at("tokens_per_step"), 32);
  EXPECT_GT(json.at("ops").size(), 10u);
  EXPECT_GT(json.at("gemm_bf16_tflops").get<double>(), 0);
}

// One rank and several print what they chose about memory, and the buffer of states.
TEST(CliBench, AStepPrintsWhatItChoseAboutMemory) {
  TestDir dir;
  const auto step = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"bench",    "step",
                                   "--recipe", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml",
                                   "--set",    "train.seq_len=16",
                                   "--set",    "train.micro_batch=1",
                                   "--set",    "train.global_batch=2",
                                   "--set",    "optimizer.offload=true",
                                   "--set",    "memory.recompute=auto",
                                   "--set",    "memory.fit=1TiB",
                                   "--steps",  "1"};
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir, words);
  };
  for (const char* ranks : {"1", "2"}) {
    const auto json = json_of(step({"--ranks", ranks, "--threads", "1", "--json"}));
    EXPECT_EQ(json.at("offload_buffer"), 0) << "a CPU has none";
    EXPECT_THAT(json.at("memory_fit"), testing::HasSubstr("of memory.fit = 1TiB"));
    EXPECT_THAT(step({"--ranks", ranks, "--threads", "1"}).out, testing::HasSubstr("of memory.fit = 1TiB"));
  }
}

TEST(CliBench, StepUsesTheDeviceOfItsRecipe) {
  if (Accelerator::why_missing().empty()) GTEST_SKIP() << "this machine has a GPU: it would run";
  TestDir dir;
  const std::vector<std::string> step{"bench",    "step",
                                      "--recipe", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml",
                                      "--set",    "run.device=cuda",
                                      "--set",    "train.seq_len=16",
                                      "--steps",  "1"};
  expect_refused(run_moebius(dir, step), 2, "use --device cpu");
  std::vector<std::string> on_cpu = step;
  on_cpu.insert(on_cpu.end(), {"--device", "cpu"});
  EXPECT_EQ(run_moebius(dir, on_cpu).code, 0);
}

// The report has the data sheet's rate, the measured rate and the roofline. It counts tokens/s as
// other programs do.
TEST(CliBench, GpuStepReportsPeaksAndRoofline) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  TestDir dir;
  const std::vector<std::string> step{"bench",    "step", "--recipe", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml",
                                      "--device", "cuda", "--set",    "train.seq_len=16",
                                      "--steps",  "2"};
  std::vector<std::string> as_json = step;
  as_json.push_back("--json");
  const auto json = json_of(run_moebius(dir, as_json));
  const auto number = [&](const char* key) { return json.at(key).get<double>(); };
  EXPECT_NEAR(number("tokens_per_s"), number("tokens_per_step") / number("median_ms") * 1e3,
              1e-6 * number("tokens_per_s"));
  EXPECT_NEAR(number("share_of_peak"), number("model_tflops") / (number("peak_gflops_per_s") * 1e-3), 1e-9);
  EXPECT_NEAR(number("share_of_roofline"), number("roofline_ms") / number("median_ms"), 1e-9);
  EXPECT_GT(number("roofline_ms"), 0);
  EXPECT_LT(number("share_of_roofline"), 1);
  EXPECT_NEAR(number("share_of_datasheet"), number("model_tflops") / number("datasheet_bf16_tflops"), 1e-9);
  EXPECT_GT(number("predicted_bytes"), number("planned_bytes"));
  const std::string text = run_moebius(dir, step).out;
  for (const char* part : {" tokens/s, ", "(MFU); ", " % of the roofline: ", ", predicted "})
    EXPECT_THAT(text, testing::HasSubstr(part));
}

// With uneven routing there are fewer lines to time. The address sanitizer needs a minute for the others.
TEST(CliBench, MoeLayerComparesARecipeWithBf16) {
  const TestDir dir;
  const std::vector<std::string> words{"bench",     "moe-layer",       "--runs", "1",         "--operands",
                                       "fp8_block", "--micro-batches", "2",      "--threads", "2"};
  std::vector<std::string> as_text = words, as_json = words;
  as_text.insert(as_text.end(), {"--routing", "uneven"});
  const std::string text = run_moebius(dir, as_text).out;
  EXPECT_THAT(text, testing::HasSubstr("bench-cpu, routing uneven, operands fp8_block; "));
  EXPECT_THAT(text, testing::ContainsRegex("\nweights quantised once a step: [0-9.]+ ms; 2 micro-batches per step: "
                                           "[0-9.]+ ms of each\nmoe_layer_fwd_bwd: bf16 [0-9.]+ ms; fp8_block "
                                           "[0-9.]+ [+] [0-9.]+ = [0-9.]+ ms, [0-9.]+ times as long\n"));
  if (is_under_address_sanitizer()) return;
  as_json.emplace_back("--json");
  const auto json = json_of(run_moebius(dir, as_json));
  EXPECT_EQ(json.at("operands"), "fp8_block");
  EXPECT_EQ(json.at("micro_batches"), 2);
  EXPECT_EQ(json.at("lines").size(), 8);
  EXPECT_EQ(json.at("lines").at(3).at("name"), "moe_layer_fwd_bwd_router_fp8_block");
  EXPECT_FALSE(json.at("lines").at(3).contains("roofline_ms"));
  const auto& time = json.at("recipe_times").at(0);
  EXPECT_EQ(time.at("name"), "moe_layer_fwd_bwd_router");
  EXPECT_DOUBLE_EQ(time.at("weights_ms"), json.at("weights_ms").get<double>() / 2);
  EXPECT_DOUBLE_EQ(time.at("total_ms"), time.at("operands_ms").get<double>() + time.at("weights_ms").get<double>());
  EXPECT_DOUBLE_EQ(time.at("ratio"), time.at("total_ms").get<double>() / time.at("bf16_ms").get<double>());
}

TEST(CliBench, PrecisionEndsWithTheRatioOfAll) {
  const TestDir dir;
  const std::string text =
      run_moebius(dir, {"bench", "precision", "--recipe", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--set",
                        "precision.recipe=fp8_block", "--runs", "1"})
          .out;
  EXPECT_THAT(text, testing::ContainsRegex("\nall of them, by their counts: [0-9.]+ times as long as in "
                                           "(bf16|f32)(; the recipe loses)?\n$"));
}

// -- options -----------------------------------------------------------------------------------------------

// An option that would change nothing is refused, with the list of workloads that it is for.
TEST(CliBench, OptionsOfOtherWorkloadsAreRefused) {
  TestDir dir;
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"experts", "--window", "5", "--documents", "7"},
       "bench experts: expected no --window, an option of attention only; leave it out"},
      {{"moe-layer", "--window", "5"}, "bench moe-layer: expected no --window, an option of attention only"},
      {{"attention", "--profile", "--steps", "0"}, "bench attention: expected no --steps, an option of step only"},
      {{"attention", "--profile"}, "bench attention: expected no --profile, an option of moe-layer and step only"},
      {{"attention", "--routing", "zipf"},
       "bench attention: expected no --routing, an option of experts, moe-layer, dispatch and announce only"},
      {{"gemm", "--shape", "olmoe"},
       "bench gemm: expected no --shape, an option of attention, experts, moe-layer, dispatch, announce and machine only"},
      {{"attention", "--operands", "fp8_block"},
       "bench attention: expected no --operands, an option of experts and moe-layer only"},
      {{"experts", "--micro-batches", "2"}, "bench experts: expected no --micro-batches, an option of moe-layer only"},
      {{"step", "--documents", "3"}, "bench step: expected no --documents, an option of attention only"},
      {{"step", "--shape", "olmoe"}, "bench step: expected no --shape"},
      {{"step", "--runs", "2"}, "bench step: expected no --runs"},
      {{"collectives", "--threads", "2"}, "bench collectives: expected no --threads"},
      {{"step", "--recipe", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--ranks", "2", "--hash"},
       "bench step: --hash needs one rank; leave it out, or run without --ranks"}};
  for (const auto& [words, text] : cases) {
    std::vector<std::string> command{"bench"};
    command.insert(command.end(), words.begin(), words.end());
    expect_refused(run_moebius(dir, command), 2, text);
  }
}

TEST(CliBench, PortableKernelsAreRefusedOnACpu) {
  TestDir dir;
  for (const char* workload : {"attention", "experts", "moe-layer", "dispatch"}) {
    const std::vector<std::string> portable{"bench", workload, "--kernels", "portable"};
    std::vector<std::string> on_cpu = portable;
    on_cpu.insert(on_cpu.end(), {"--device", "cpu"});
    for (const auto& words : {portable, on_cpu})
      expect_refused(run_moebius(dir, words), 2,
                     "--kernels: portable kernels are a GPU's, and this benchmark runs on the CPU; add --device cuda, "
                     "or leave --kernels out");
  }
  expect_refused(run_moebius(dir, {"bench", "gemm", "--kernels", "portable"}), 2,
                 "bench gemm: expected no --kernels, an option of attention, experts, moe-layer and dispatch only");
}

TEST(CliBench, UnderLoadIsRefusedOnACpu) {
  TestDir dir;
  for (const char* workload : {"attention", "experts", "gemm", "moe-layer"})
    expect_refused(
        run_moebius(dir, {"bench", workload, "--under-load"}), 2,
        "--under-load: only a GPU rests between runs, and this benchmark runs on the CPU; add --device cuda, "
        "or leave --under-load out");
  expect_refused(run_moebius(dir, {"bench", "precision", "--device", "cpu", "--under-load"}), 2,
                 "--under-load: only a GPU rests between runs");
  expect_refused(run_moebius(dir, {"bench", "step", "--under-load"}), 2, "bench step: expected no --under-load");
}

TEST(CliBench, MeaninglessValuesAreRefused) {
  TestDir dir;
  for (const char* exponent : {"-5", "nan", "inf", "1e4"})
    expect_refused(run_moebius(dir, {"bench", "moe-layer", "--routing", "zipf", "--zipf", exponent}), 2,
                   "--zipf: expected 0 (all experts are equally popular) to 100; got ");
  expect_refused(run_moebius(dir, {"bench", "experts", "--zipf", "2"}), 2,
                 "--zipf: expected --routing zipf, since this is its exponent; got --routing balanced");
  expect_refused(run_moebius(dir, {"bench", "moe-layer", "--operands", "none"}), 2,
                 "--operands: expected bf16, fp8_block or fp8_tensor; got \"none\"");
  expect_refused(run_moebius(dir, {"bench", "moe-layer", "--micro-batches", "2"}), 2,
                 "--micro-batches: expected --operands fp8_block or fp8_tensor, whose weights are quantised once a "
                 "step; got --operands bf16");
  expect_refused(run_moebius(dir, {"bench", "moe-layer", "--operands", "fp8_block", "--shape", "gpt-oss-20b"}), 2,
                 "--operands: FP8 kernels take no experts with biases");
  expect_refused(run_moebius(dir, {"bench", "attention", "--head-dim", "257"}), 2,
                 "--head-dim: expected 0 to 256; got 257; 0 takes the widths of the shape");
  expect_refused(run_moebius(dir, {"bench", "attention", "--window", "-1"}), 2,
                 "--window: expected at least 0; got -1; 0 lets a query attend to all keys before it");
  expect_refused(
      run_moebius(dir, {"bench", "attention", "--documents", "7"}), 2,
      "--documents: expected a divisor of the 512 tokens of a sequence; got 7; 1 means one document in each sequence");
  expect_refused(
      run_moebius(dir, {"bench", "attention", "--paths"}), 2,
      "--paths: expected a Hopper GPU, its own kernels, and heads of 64, 96, 128 or 256, or of 192 with values of 128; "
      "got q ");
}

TEST(CliBench, ReportsRepeatTheOptions) {
  TestDir dir;
  const std::vector<std::string> attention{"bench", "attention", "--window", "7", "--documents", "16", "--runs", "1"};
  std::vector<std::string> as_json = attention;
  as_json.push_back("--json");
  const auto json = json_of(run_moebius(dir, as_json));
  EXPECT_EQ(json.at("window"), 7);
  EXPECT_EQ(json.at("documents"), 16);
  EXPECT_EQ(json.at("under_load"), false);
  EXPECT_FALSE(json.contains("routing"));
  for (const auto& line : json.at("lines")) {
    EXPECT_GT(line.at("relative_error").get<double>(), 0);
    EXPECT_LT(line.at("relative_error").get<double>(), 0.02);
  }
  EXPECT_EQ(json.at("lines").at(1).at("relative_errors").size(), 3u) << "dq, dk and dv";
  const std::string text = run_moebius(dir, attention).out;
  EXPECT_THAT(text, testing::HasSubstr("bench-cpu, window 7, documents 16; "));
  EXPECT_THAT(text, testing::HasSubstr("rel. off"));
  EXPECT_THAT(text, testing::Not(testing::HasSubstr("routing")));
}

TEST(CliBench, AStepNeedsItsRecipe) {
  TestDir dir;
  expect_refused(
      run_moebius(dir, {"bench", "step"}), 2,
      "bench step: expected the recipe recipes/bench_cpu.toml below the working directory; it does not exist; "
      "change to the folder of Moebius' sources, or name a recipe with --recipe");
}

}  // namespace
}  // namespace moebius

#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "bench/check.h"
#include "bench/peak.h"
#include "bench/ranks.h"
#include "bench/timing.h"
#include "device/accelerator.h"
#include "device/gpu_limits.h"
#include "io/testing.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/cpu/testing.h"
#include "train/testing.h"

namespace moebius {
namespace {

// Each workload checks its own results. A sixteenth of the size is enough to see that it runs,
// counts and compares.
class Workload : public ::testing::TestWithParam<BenchReport (*)(const BenchSpec&)> {};

TEST_P(Workload, ReportsTimesCostsAndCorrectResults) {
  for (const auto kind : {BenchRouting::Kind::balanced, BenchRouting::Kind::zipf}) {
    const BenchReport report =
        GetParam()({.threads = 2, .runs = 2, .scale = 1.0 / 16, .shape = "bench-cpu", .routing = {.kind = kind}});
    EXPECT_GT(report.ceilings.flops_per_s, 0);
    EXPECT_GT(report.ceilings.bytes_per_s, 0);
    EXPECT_GE(report.lines.size(), 2u);
    for (const BenchLine& line : report.lines) {
      EXPECT_GT(line.median_ms, 0) << line.name;
      EXPECT_GE(line.median_ms, line.min_ms) << line.name;
      EXPECT_EQ(line.runs, 2) << line.name;
      EXPECT_GT(line.cost.flops, 0) << line.name;
      EXPECT_NE(line.checksum, 0) << line.name;
      EXPECT_GT(line.largest_error(), 0) << line.name;
    }
  }
}

std::string workload_name(const ::testing::TestParamInfo<Workload::ParamType>& info) {
  constexpr const char* kNames[] = {"gemm", "attention", "experts", "moe_layer"};
  return kNames[info.index];
}
INSTANTIATE_TEST_SUITE_P(All, Workload, ::testing::Values(bench_gemm, bench_attention, bench_experts, bench_moe_layer),
                         workload_name);

// cuDNN has no backward pass of such heads on GPUs other than Hopper, and portable kernels exclude it everywhere.
TEST(BenchAttention, WideHeadsHaveLinesOfTheKernelsOfTheGpu) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  const auto names = [](KernelChoice kernels) {
    std::set<std::string> all;
    for (const BenchLine& line : bench_attention({.device = DeviceKind::cuda,
                                 .threads = 2,
                                 .runs = 1,
                                 .scale = 1.0 / 16,
                                 .shape = "qwen3-30b-a3b",
                                 .kernels = kernels,
                                 .head_dim = 192})
                                     .lines)
      all.insert(line.name);
    return all;
  };
  const std::set<std::string> own{"attention_fwd", "attention_bwd"};
  EXPECT_EQ(names(KernelChoice::portable), own);
  std::set<std::string> chosen = own;
  if (has_cudnn()) chosen = {"attention_fwd own", "attention_fwd cudnn", "attention_bwd"};
  if (has_cudnn() && query_gpu_limits().is_hopper())
    chosen = {"attention_fwd own", "attention_fwd cudnn", "attention_bwd own", "attention_bwd cudnn"};
  EXPECT_EQ(names(KernelChoice::automatic), chosen);
}

// Each path is timed and compared with plain loops, as the lines of a run are.
TEST(BenchAttention, HasALineForEachPathOnHopper) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  ThreadPool pool(2);
  if (!uses_hopper_kernels(Stream(*testing::accelerator(), pool))) GTEST_SKIP() << "needs a Hopper GPU";
  const BenchReport report = bench_attention({.device = DeviceKind::cuda,
                                              .threads = 2,
                                              .runs = 1,
                                              .scale = 1.0 / 16,
                                              .shape = "qwen3-30b-a3b",
                                              .mask = {.window = 100},
                                              .paths = true});
  std::set<std::string> names;
  int64_t taken = 0;
  for (const BenchLine& line : report.lines) {
    names.insert(line.name);
    taken += line.kernel == "the path that a run takes";
  }
  for (const char* path : {"one_kernel", "kept_ds", "recomputed"})
    EXPECT_EQ(names.count(std::string("attention_bwd ") + path), 1u) << path;
  EXPECT_EQ(taken, 1);
}

// Operands that are quantised before give results that are near those of the numbers themselves.
TEST(BenchExperts, QuantisedOperandsGiveNearlyTheSameResults) {
  for (const auto recipe : {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor}) {
    const BenchReport report = bench_experts({.threads = 2,
                                              .runs = 2,
                                              .scale = 1.0 / 16,
                                              .shape = "bench-cpu",
                                              .routing = {.kind = BenchRouting::Kind::uneven},
                                              .operands = recipe});
    ASSERT_EQ(report.lines.size(), 8u);
    EXPECT_EQ(report.lines.back().name, "expert_wgrad_w1_stored");
    for (const BenchLine& line : report.lines) {
      EXPECT_GT(line.largest_error(), 0x1p-8) << line.name;
      EXPECT_LT(line.largest_error(), recipe == PrecisionRecipe::fp8_tensor ? 0.115 : 0.073) << line.name;
    }
  }
}

// Each line in bf16 is followed by that of the recipe. The layer chooses its experts with balanced, not with uneven.
TEST(BenchMoe, TimesALayerInBf16AndWithARecipe) {
  for (const auto recipe : {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor}) {
    for (const auto kind : {BenchRouting::Kind::balanced, BenchRouting::Kind::uneven}) {
      const bool is_routed = kind == BenchRouting::Kind::balanced;
      const BenchReport report = bench_moe_layer({.threads = 2,
                                                  .runs = 2,
                                                  .scale = 1.0 / 16,
                                                  .shape = "bench-cpu",
                                                  .routing = {.kind = kind},
                                                  .operands = recipe,
                                                  .micro_batches = 8,
                                                  .profile = is_routed,
                                                  .first_micro_batch = is_routed});
      ASSERT_EQ(report.lines.size(), is_routed ? 8u : 4u);
      for (size_t i = 0; i < report.lines.size(); i += 2) {
        const BenchLine &plain = report.lines[i], &quantised = report.lines[i + 1];
        EXPECT_EQ(quantised.name, fmt::format("{}_{}", plain.name, name_of(recipe)));
        EXPECT_EQ(quantised.cost.flops, plain.cost.flops);
        EXPECT_EQ(quantised.runs, 2);
        EXPECT_LE(plain.largest_error(), kBf16Tolerance) << plain.name;
        for (const auto& [result, error] : quantised.errors)
          EXPECT_GT(error, kBf16Tolerance) << quantised.name << " " << result;
      }
      EXPECT_GT(report.weights_ms, 0);
      ASSERT_EQ(report.recipe_times.size(), is_routed ? 2u : 1u);
      const RecipeTime& time = report.recipe_times.back();
      EXPECT_EQ(time.name, "moe_layer_fwd_bwd");
      EXPECT_EQ(time.bf16_ms, report.lines[report.lines.size() - 2].median_ms);
      EXPECT_EQ(time.recipe_ms, report.lines.back().median_ms);
      EXPECT_DOUBLE_EQ(time.weights_ms, report.weights_ms / 8);
      EXPECT_DOUBLE_EQ(time.ratio(), (time.recipe_ms + time.weights_ms) / time.bf16_ms);
      EXPECT_EQ(report.ops.contains("quantize"), is_routed);  // the profile is of the recipe's layer
    }
  }
}

TEST(BenchMoe, WithoutARecipeThereIsNothingToCompare) {
  const BenchReport report = bench_moe_layer({.threads = 1, .runs = 1, .scale = 1.0 / 16});
  EXPECT_EQ(report.lines.size(), 4u);
  EXPECT_TRUE(report.recipe_times.empty());
  EXPECT_EQ(report.weights_ms, 0);
}

TEST(BenchDevice, BodiesRunInTurns) {
  BenchDevice device(DeviceKind::cpu, 1, 3);
  std::string order;
  const TimedRuns timed = device.time_in_turns({[&] { order += 'a'; }, [&] { order += 'b'; }});
  EXPECT_EQ(order, "abababab");
  EXPECT_EQ(timed.calls, 4);
  ASSERT_EQ(timed.ms.size(), 2u);
  EXPECT_EQ(timed.ms[0].size(), 3u);
  EXPECT_EQ(timed.ms[1].size(), 3u);
  BenchLine line;
  TimedRuns{.ms = {{9}, {3, 1, 2}}}.fill(line, 1);
  EXPECT_EQ(line.median_ms, 2);
  EXPECT_EQ(line.min_ms, 1);
  EXPECT_EQ(line.runs, 3);
}

TEST(BenchShapes, UnevenRoutesChooseAnExpertOnce) {
  for (const BenchShape& whole : bench_shapes()) {
    const BenchShape shape = bench_shape(whole.name, 1.0 / 16);
    const std::vector<int32_t> topk_TK = bench_route(shape, {.kind = BenchRouting::Kind::uneven}).topk_TK;
    const std::vector<int32_t> offsets = bench_rows(shape, topk_TK).offsets_E1;
    const double mean = static_cast<double>(shape.R()) / static_cast<double>(shape.E);
    std::set<int32_t> counts;
    for (size_t e = 1; e < offsets.size(); ++e) {
      const int32_t rows = offsets[e] - offsets[e - 1];
      counts.insert(rows);
      // Weights from 0.6 to 1.4, whose mean is somewhere between.
      EXPECT_GE(rows, std::floor(0.6 / 1.4 * mean)) << shape.name;
      EXPECT_LE(rows, std::ceil(1.4 / 0.6 * mean)) << shape.name;
    }
    EXPECT_GT(counts.size(), 1u) << shape.name;
    if (shape.E == shape.K) continue;  // rows of a slice come from many ranks
    ASSERT_GE(3 * shape.E, 7 * shape.K) << shape.name;
    for (int64_t t = 0; t < shape.T(); ++t) {
      const auto first = topk_TK.begin() + t * shape.K;
      ASSERT_EQ(std::set<int32_t>(first, first + shape.K).size(), static_cast<size_t>(shape.K)) << shape.name << t;
    }
  }
}

// The values are those that bench/peers/moe_shapes.py draws.
TEST(BenchShapes, RowsPerExpertEqualThoseOfThePeerBenchmark) {
  const auto counts = [](const char* name, BenchRouting::Kind kind) {
    const BenchShape shape = bench_shape(name);
    const std::vector<int32_t> offsets = bench_rows(shape, bench_route(shape, {.kind = kind}).topk_TK).offsets_E1;
    std::vector<int32_t> counts;
    for (size_t e = 1; e < offsets.size(); ++e) counts.push_back(offsets[e] - offsets[e - 1]);
    return counts;
  };
  EXPECT_EQ(counts("mixtral-8x7b", BenchRouting::Kind::balanced), std::vector<int32_t>(8, 8192));
  EXPECT_EQ(counts("mixtral-8x7b", BenchRouting::Kind::zipf),
            (std::vector<int32_t>{6599, 20702, 4443, 8800, 3385, 5367, 12426, 3814}));
  EXPECT_EQ(counts("deepseek-v3-8-local", BenchRouting::Kind::zipf),
            (std::vector<int32_t>{23986, 96063, 16055, 32147, 12029, 19264, 48776, 13824}));
}

TEST(BenchShapes, UnknownNamesAreListed) {
  expect_error(ErrorKind::usage, "bench: --shape: expected one of bench-cpu, mixtral-8x7b, qwen3-30b-a3b, ",
               [] { bench_shape("warp"); });
}

TEST(BenchShapes, RoutesAreTheTopKOfTheirLogits) {
  const BenchShape shape = bench_shape("bench-cpu", 1.0 / 16);
  for (const auto kind : {BenchRouting::Kind::balanced, BenchRouting::Kind::zipf}) {
    const BenchRoute route = bench_route(shape, {.kind = kind});
    for (int64_t t = 0; t < shape.T(); ++t) {
      const float* logits = &route.logits_TE[t * shape.E];
      const float least = logits[route.topk_TK[t * shape.K + shape.K - 1]];
      EXPECT_EQ(std::count_if(logits, logits + shape.E, [&](float x) { return x >= least; }), shape.K);
    }
  }
}

// The first two steps on a GPU run eagerly, and the third is captured. With fewer warm-up steps the
// first timed one would include the capture.
TEST(BenchStep, WarmsUpUntilStepsAreCaptured) {
  EXPECT_EQ(warm_up_steps(DeviceKind::cuda), 3);
  EXPECT_EQ(warm_up_steps(DeviceKind::cpu), 1);
}

TEST(BenchStep, WeightsInEightBitsGiveTheSameBits) {
  RunSpec run = testing::tiny_run();
  run.precision.recipe = PrecisionRecipe::fp8_block;
  run.precision.weights = PrecisionChoice::compute;
  const StepBench compute = bench_step(run, {.steps = 1, .hash = true});
  run.precision.weights = PrecisionChoice::recipe;
  const StepBench eight_bits = bench_step(run, {.steps = 1, .hash = true});
  EXPECT_EQ(eight_bits.first_loss, compute.first_loss);
  EXPECT_EQ(eight_bits.masters_hash, compute.masters_hash);
}

TEST(BenchStep, PlannedMemoryOfAGpuIsWithoutStatesOnTheHost) {
  if (!testing::accelerator()) GTEST_SKIP() << Accelerator::why_missing();
  RunSpec run = testing::tiny_run();
  run.device = DeviceKind::cuda;
  const int64_t resident = bench_step(run, {.steps = 1}).planned_bytes;
  run.optimizer.offload = true;
  run.optimizer.offload_buffer = 0;
  EXPECT_LT(bench_step(run, {.steps = 1}).planned_bytes, resident);
}

TEST(Bench, DatasheetRatesOfHopperGpusAreKnown) {
  EXPECT_EQ(datasheet_tflops("NVIDIA H200"), 989.4);
  EXPECT_EQ(datasheet_tflops("NVIDIA H100 80GB HBM3"), 989.4);
  EXPECT_EQ(datasheet_tflops("NVIDIA H100 PCIe"), 756.5);
  EXPECT_EQ(datasheet_tflops("NVIDIA H20"), 148.0);
  EXPECT_EQ(datasheet_tflops("NVIDIA A100-SXM4-80GB"), 0) << "not listed";
}

}  // namespace
}  // namespace moebius

// log.precision: the sums that quantising adds to, in whole steps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "device/accelerator.h"
#include "io/testing.h"
#include "model/quantize_stats.h"
#include "tests/equivalence/gpu_specs.h"
#include "train/testing.h"

namespace moebius {
namespace {

// The sums of each layer and step, which are read before the step ends.
std::vector<std::vector<double>> precision_sums(Engine& engine, int64_t steps, std::vector<double>& losses) {
  std::vector<std::vector<double>> sums;
  RandomBatches source(engine.spec());
  for (int64_t step = 1; step <= steps; ++step) {
    engine.step(source, step, 1e-4 * static_cast<double>(step));
    losses.push_back(engine.loss());
    for (const QuantizeStats::Layer& layer : engine.model().quantize_stats()->layers()) {
      const double* of_layer = engine.on_host(layer.sums_5).ptr<double>();
      sums.emplace_back(of_layer, of_layer + 5);
    }
    engine.end_of_step();
  }
  return sums;
}

TEST(LogPrecision, SumsChangeNoBitOnACpu) {
  for (const auto recipe : {PrecisionRecipe::fp8_block, PrecisionRecipe::mxfp8}) {
    SCOPED_TRACE(name_of(recipe));
    EngineSpec counts = quantised_on(DeviceKind::cpu, recipe, false);
    Engine plain(counts);
    counts.measures_precision = true;
    Engine counting(counts);
    std::vector<double> losses;
    EXPECT_FALSE(precision_sums(initialised(counting), 3, losses).empty());
    EXPECT_EQ(losses, train(initialised(plain), 3));
    EXPECT_EQ(masters(counting), masters(plain));
  }
}

// Recomputing a layer, and an evaluation between two steps, leave the sums as they are.
TEST(LogPrecision, CountsEachOperandOfAStepOnce) {
  for (const auto recipe :
       {PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor, PrecisionRecipe::mxfp8, PrecisionRecipe::nvfp4}) {
    SCOPED_TRACE(name_of(recipe));
    EngineSpec spec = quantised_on(DeviceKind::cpu, recipe, false);
    spec.measures_precision = true;
    Engine once(spec);
    spec.recompute.layer = true;
    Engine recomputes(spec);
    std::vector<double> losses;
    const auto want = precision_sums(initialised(once), 2, losses);
    EXPECT_EQ(precision_sums(initialised(recomputes), 2, losses), want);
    for (const std::vector<double>& sums : want) EXPECT_GT(sums[0], 0);

    const auto all = [&] {
      std::vector<double> sums;
      for (const QuantizeStats::Layer& layer : once.model().quantize_stats()->layers()) {
        const double* of_layer = once.on_host(layer.sums_5).ptr<double>();
        sums.insert(sums.end(), of_layer, of_layer + 5);
      }
      return sums;
    };
    const std::vector<double> before = all();
    once.batch().training = false;
    once.forward();
    EXPECT_EQ(all(), before) << "an evaluation is not counted";
  }
}

// Counting reads operands once more, and its sums do not depend on graphs. The CPU has nearly the same operands, so the
// number of elements is the same. On an H200 up to 1.6 times as many elements became zero as on a CPU. The smallest
// scale was an eighth of the CPU's at one commit, and eight times the CPU's at another. Both devices have the same
// sums from the same numbers, with padding and empty experts too (ops/quantize/quantize_stats_test.cc). So the
// operands differ. Likely these are gradients that cancel, as those of the scores of a first token: what is left of
// them is rounding, which differs between devices. So counts are compared within a factor of two. The smallest scale
// is that of a single block, and is not compared.
void expect_sums_that_change_no_bit(std::initializer_list<PrecisionRecipe> recipes, KernelChoice kernels) {
  for (const PrecisionRecipe recipe : recipes) {
    SCOPED_TRACE(fmt::format("{}, {}", name_of(recipe), name_of(kernels)));
    const auto with_kernels = [&](DeviceKind device, bool graph) {
      EngineSpec spec = quantised_on(device, recipe, graph);
      spec.kernels = kernels;
      return spec;
    };
    const auto counting = [&](DeviceKind device, bool graph) {
      EngineSpec spec = with_kernels(device, graph);
      spec.measures_precision = true;
      return spec;
    };
    Engine plain(with_kernels(DeviceKind::cuda, true)), captured(counting(DeviceKind::cuda, true)),
        eager(counting(DeviceKind::cuda, false)), on_cpu(counting(DeviceKind::cpu, false));
    const std::vector<double> expected = train(initialised(plain), 5);
    std::vector<double> losses, eager_losses, cpu_losses;
    const auto sums = precision_sums(initialised(captured), 5, losses);
    EXPECT_EQ(losses, expected);
    EXPECT_EQ(masters(captured), masters(plain));
    EXPECT_EQ(precision_sums(initialised(eager), 5, eager_losses), sums);
    const auto of_cpu = precision_sums(initialised(on_cpu), 5, cpu_losses);
    ASSERT_EQ(of_cpu.size(), sums.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      EXPECT_GT(sums[i][0], 0);
      EXPECT_NEAR(sums[i][0], of_cpu[i][0], 0.02 * of_cpu[i][0]);
      EXPECT_GT(sums[i][3], 0);
      EXPECT_LE(sums[i][3], sums[i][4]);
      if (i >= sums.size() / 5) continue;  // later steps have other weights
      for (const size_t counted : {1, 2}) {
        EXPECT_LE(sums[i][counted], 2 * of_cpu[i][counted] + 50) << "sum " << counted << " of layer " << i;
        EXPECT_GE(sums[i][counted], of_cpu[i][counted] / 2 - 50) << "sum " << counted << " of layer " << i;
      }
      EXPECT_LE(sums[i][4], 2 * of_cpu[i][4]) << i;
      EXPECT_GE(sums[i][4], of_cpu[i][4] / 2) << i;
    }
  }
}

TEST(LogPrecisionOnGpu, SumsOfLogPrecisionChangeNoBit) {
  if (const std::string why = Accelerator::why_missing(); !why.empty()) GTEST_SKIP() << why;
  using enum PrecisionRecipe;
  expect_sums_that_change_no_bit({fp8_block, fp8_tensor, nvfp4}, KernelChoice::automatic);
}

TEST(LogPrecisionOnGpu, SumsOfLogPrecisionOnPortableKernelsChangeNoBit) {
  if (const std::string why = Accelerator::why_missing(); !why.empty()) GTEST_SKIP() << why;
  using enum PrecisionRecipe;
  expect_sums_that_change_no_bit({fp8_tensor, nvfp4}, KernelChoice::portable);
}

}  // namespace
}  // namespace moebius

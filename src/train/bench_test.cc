#include "train/bench.h"

#include "io/testing.h"
#include "train/bench_timing.h"

namespace moebius {
namespace {

// Each workload checks its own results; a sixteenth of the size is enough to see that it runs, counts and compares.
class Workload : public testing::TestWithParam<std::vector<BenchLine> (*)(const BenchSpec&)> {};

TEST_P(Workload, IsTimedCountedAndRight) {
  const std::vector<BenchLine> lines = GetParam()({.threads = 2, .runs = 2, .scale = 1.0 / 16});
  EXPECT_GE(lines.size(), 2u);
  for (const BenchLine& line : lines) {
    EXPECT_GT(line.median_ms, 0) << line.name;
    EXPECT_GE(line.median_ms, line.min_ms) << line.name;
    EXPECT_EQ(line.runs, 2) << line.name;
    EXPECT_GT(line.cost.flops, 0) << line.name;
    EXPECT_NE(line.checksum, 0) << line.name;
  }
}

std::string workload_name(const testing::TestParamInfo<Workload::ParamType>& info) {
  constexpr const char* kNames[] = {"gemm", "attention", "experts", "moe_layer"};
  return kNames[info.index];
}
INSTANTIATE_TEST_SUITE_P(All, Workload, testing::Values(bench_gemm, bench_attention, bench_experts, bench_moe_layer), workload_name);

TEST(Bench, AWrongChecksumIsAnError) {
  expect_error(ErrorKind::numerics, "bench gemm: expected checksum 3 within 0.5; got 4; the result is wrong",
               [] { check_sum({.name = "gemm", .checksum = 4, .expected = 3}, 0.5); });
}

}  // namespace
}  // namespace moebius

#include "cli/bench/machine.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/error.h"

namespace moebius {
namespace {

using testing::HasSubstr;

BenchLine line(const char* name, double flops, double median_ms, double min_ms) {
  return {.name = name, .median_ms = median_ms, .min_ms = min_ms, .runs = 7, .cost = {.flops = flops}};
}

// Products run at 100 GFLOP/s, experts at 50, attention at 40 and 20.
MachineMeasurements quiet_machine() {
  MachineMeasurements m{.device = "2 threads of a \"CPU\"",
                        .threads = 2,
                        .memory_bytes = 8e9,
                        .host_memory_bytes = 8e9,
                        .heads = {64, 64},
                        .kernel_us = 3,
                        .ranks = 2};
  m.products.lines = {line("gemm_bf16", 1e9, 10, 9.9), line("gemm_f32", 1e9, 40, 39)};
  m.products.ceilings.bytes_per_s = 20e9;
  m.experts.lines = {line("expert_up", 1e9, 20, 19), line("expert_down", 1e9, 20, 19)};
  m.attention.lines = {line("attention_fwd", 1e9, 25, 24), line("attention_bwd", 1e9, 50, 49)};
  m.gathers = {{.name = "all_gather", .bytes = 2000, .median_ms = 0.031},
               {.name = "all_gather", .bytes = 2002000, .median_ms = 1.031}};
  return m;
}

double share(const PlanMachine& m, Share s) { return m.of(PlanSystem::moebius)[static_cast<size_t>(s)]; }

TEST(BenchMachine, WritesAFileThatThePlannerReads) {
  const PlanMachine m = parse_machine(to_toml(machine_of(quiet_machine())), "measured.toml");
  EXPECT_FALSE(m.is_gpu);
  EXPECT_NEAR(m.bf16_tflops, 0.1, 1e-6);
  EXPECT_NEAR(m.memory_tb_s, 0.02, 1e-6);
  EXPECT_EQ(m.threads, 2);
  EXPECT_NEAR(share(m, Share::products), 1, 1e-3);
  EXPECT_NEAR(share(m, Share::experts), 0.5, 1e-3);
  EXPECT_NEAR(share(m, Share::attention_forward), 0.4, 1e-3);
  EXPECT_NEAR(share(m, Share::attention_backward), 0.2, 1e-3);
  // Half of a gathered tensor is sent: a million bytes in a millisecond, and 30 us for a call.
  EXPECT_NEAR(m.inside_gb_s, 1, 1e-3);
  EXPECT_NEAR(m.inside_us, 30, 0.1);
  EXPECT_EQ(m.domain_ranks, 2);
  for (const auto& [key, source] : m.sources) EXPECT_EQ(source.find("noisy"), std::string::npos) << key;
}

// Plans for a GPU that no file knows assume what the file of an H100 has.
TEST(BenchMachine, AssumesForAGpuTheFiguresOfAnH100) {
  MachineMeasurements measured = quiet_machine();
  measured.is_gpu = true;
  measured.capability = 90;
  measured.multiprocessors = 132;
  measured.datasheet_flops_per_s = 989e12;
  const PlanMachine m = parse_machine(to_toml(machine_of(measured)), "measured.toml");
  const PlanMachine h100 = load_machine("h100", MOEBIUS_SOURCE_DIR "/machines");
  std::vector<std::string> keys;
  for (const MachineFigure& f : machine_figures()) {
    const std::string key = fmt::format("{}.{}", f.table, f.key);
    const auto source = m.sources.find(key);
    if (source == m.sources.end() || source->second != "assumed: as an H100") continue;
    EXPECT_DOUBLE_EQ(m.*f.value, h100.*f.value) << key;
    keys.push_back(key);
  }
  EXPECT_THAT(keys, testing::ElementsAre("rank.exponentials_t_s", "rank.f32_tflops", "rank.portable", "host.link_gb_s",
                                         "host.link_one_way_gb_s"));
}

// A median run that takes a third longer than the fastest is no measurement to rely on.
TEST(BenchMachine, ReportsMeasurementNoise) {
  MachineMeasurements measured = quiet_machine();
  measured.experts.lines[0].min_ms = 10;
  const PlanMachine m = parse_machine(to_toml(machine_of(measured)), "measured.toml");
  EXPECT_THAT(m.sources.at("share.moebius.experts"),
              HasSubstr("noisy: moebius bench machine: experts; the median run took 38 % longer than the fastest"));
  EXPECT_EQ(m.sources.at("share.moebius.products"),
            "moebius bench machine: products; the median run took 1 % longer than the fastest");
  EXPECT_THAT(m.assumed_figures(), testing::Contains(HasSubstr("share.moebius.experts: noisy")));
}

TEST(BenchMachine, RefusesRatesOutsideTheRangeOfMachineFiles) {
  MachineMeasurements measured = quiet_machine();
  measured.products.ceilings.bytes_per_s = 20e6;
  try {
    machine_of(measured);
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(),
                HasSubstr("bench machine: rank.memory_tb_s was measured as 2e-05; expected 0.001 to 1000; end "
                          "other work on the machine, and measure again"));
  }
}

// The workloads are there under the names that the file is made of.
TEST(BenchMachine, MeasuresEachClassOfKernels) {
  const MachineMeasurements m = measure_machine({.threads = 1, .runs = 1, .scale = 1.0 / 16}, 1);
  const auto has = [](const BenchReport& report, const char* name) {
    for (const BenchLine& l : report.lines)
      if (l.name.starts_with(name) && l.median_ms > 0 && l.cost.flops > 0) return true;
    return false;
  };
  EXPECT_TRUE(has(m.products, "gemm_bf16"));
  EXPECT_TRUE(has(m.experts, ""));
  EXPECT_TRUE(has(m.attention, "attention_fwd"));
  EXPECT_TRUE(has(m.attention, "attention_bwd"));
  EXPECT_GT(m.products.ceilings.bytes_per_s, 0);
  EXPECT_GT(m.memory_bytes, 0);
  EXPECT_TRUE(m.gathers.empty());  // of one rank
}

}  // namespace
}  // namespace moebius

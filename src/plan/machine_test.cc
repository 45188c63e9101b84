#include "plan/machine.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "plan/fit.h"
#include "plan/predict.h"
#include "plan/testing.h"
#include "train/watch/host_link.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::string kMachines = std::string(MOEBIUS_SOURCE_DIR) + "/machines";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Machines, AllFilesOfTheFolderRoundTrip) {
  EXPECT_THAT(known_machines(kMachines),
              ElementsAre("b200", "epyc2", "gb200", "gb300", "h100", "h200", "h800", "xeon2"));
  for (const std::string& name : known_machines(kMachines)) {
    const PlanMachine m = load_machine(name, kMachines);
    const PlanMachine again = parse_machine(to_toml(m), name);
    for (const MachineFigure& f : machine_figures())
      EXPECT_NEAR(again.*f.value, m.*f.value, 1e-3 * m.*f.value) << f.key;
    EXPECT_EQ(again.sources, m.sources);
    EXPECT_EQ(again.capability, m.capability);
    EXPECT_EQ(to_toml(again), to_toml(m));
  }
  EXPECT_EQ(load_machine("gb200", kMachines).domain_ranks, 72);
}

TEST(Machines, CapabilitySaysWhetherHopperKernelsMayRun) {
  EXPECT_EQ(load_machine("h200", kMachines).capability, 90);
  EXPECT_EQ(load_machine("gb300", kMachines).capability, 103);
  const auto counts = [](const std::string& line) {
    const std::string text = to_toml(load_machine("h100", kMachines));
    return parse_machine(replaced(text, "capability = \"9.0\"\n", line), "m.toml").counts_for_hopper();
  };
  EXPECT_TRUE(counts("capability = \"9.0\"\n"));
  EXPECT_TRUE(counts("")) << "it may be a Hopper GPU";
  EXPECT_FALSE(counts("capability = \"8.0\"\n"));
  EXPECT_FALSE(counts("capability = \"12.0\"\n"));
  for (const char* bad : {"capability = \"9\"\n", "capability = \"7.5\"\n", "capability = \"9.0a\"\n"}) {
    EXPECT_THAT(refused([&] { counts(bad); }),
                HasSubstr("machine.capability must be the compute capability of a GPU from 8.0 on, such as \"9.0\""));
  }
  EXPECT_THAT(refused([] {
                parse_machine(replaced(to_toml(load_machine("epyc2", kMachines)), "device = \"cpu\"\n",
                                       "device = \"cpu\"\ncapability = \"9.0\"\n"),
                              "m.toml");
              }),
              HasSubstr("machine.capability is that of a GPU, and machine.device is \"cpu\"; leave it out"));
}

// A file may take a figure from that of another machine, and says so in its source.
TEST(Machines, FiguresOfAnotherMachineAreItsOwn) {
  const std::vector<std::pair<std::string, std::string>> others{{"as an H100", "h100"},
                                                                {"as an H200", "h200"},
                                                                {"that of machines/h100", "h100"},
                                                                {"that of machines/h200", "h200"}};
  int compared = 0;
  for (const std::string& name : known_machines(kMachines)) {
    const PlanMachine m = load_machine(name, kMachines);
    for (const MachineFigure& f : machine_figures()) {
      const std::string key = fmt::format("{}.{}", f.table, f.key);
      const auto source = m.sources.find(key);
      if (source == m.sources.end()) continue;
      for (const auto& [said, other] : others) {
        if (source->second.find(said) == std::string::npos) continue;
        EXPECT_DOUBLE_EQ(m.*f.value, load_machine(other, kMachines).*f.value) << name << ", " << key;
        ++compared;
      }
    }
  }
  EXPECT_GE(compared, 12);
}

// A run compares the link to its host with the rate that plans for it assume.
TEST(Machines, HostLinkRateEqualsTheRateThatRunsExpect) {
  for (const char* name : {"h100", "h200"})
    EXPECT_DOUBLE_EQ(load_machine(name, kMachines).link_gb_s * 1e9, kPcie5LinkRate) << name;
}

// A file may lack the rate of copies in one direction, and a written file lacks it too.
TEST(Machines, MayLackTheRateOfCopiesInOneDirection) {
  const std::string key = "link_one_way_gb_s", text = to_toml(load_machine("h200", kMachines));
  const size_t begin = text.find(key), end = text.find('\n', begin) + 1;
  ASSERT_NE(begin, std::string::npos);
  const PlanMachine without = parse_machine(std::string(text).erase(begin, end - begin), "m.toml");
  EXPECT_EQ(without.link_one_way_gb_s, 0);
  EXPECT_THAT(to_toml(without), testing::Not(HasSubstr(key)));
  EXPECT_THAT(
      refused([&] { parse_machine(replaced(text, key + " = { is = 55", key + " = { is = 44"), "m.toml"); }),
      HasSubstr("host.link_one_way_gb_s, of copies in one direction alone, must be at least host.link_gb_s = 45; "
                "got 44"));
}

TEST(Machines, ErrorsNameTheMachineOrTheKey) {
  EXPECT_THAT(
      refused([] { load_machine("h100", "no_folder"); }),
      HasSubstr(
          "expected a folder \"no_folder\" with machine files, to find machine \"h100\"; there is none here; run this in "
          "the root"));
  EXPECT_THAT(refused([] { load_machine("h300", kMachines); }),
              HasSubstr("no machine is called \"h300\"; the folder " + kMachines + " has b200, epyc2, gb200, gb300"));
  const std::string good = to_toml(load_machine("h100", kMachines));
  const auto text_of = [&](const std::string& from, const std::string& to) {
    return refused([&] { parse_machine(replaced(good, from, to), "m.toml"); });
  };
  EXPECT_THAT(text_of("memory_gb = { is = 83.7,", "memory_gb = { is = -80,"),
              HasSubstr("rank.memory_gb must be from 0.1 to 100000; got -80"));
  EXPECT_THAT(text_of("bf16_tflops = { is = 989,", "bf16_tflops = { is = 989, was = 900,"),
              HasSubstr("rank.bf16_tflops has only is and from; got was"));
  EXPECT_THAT(text_of("memory_gb", "memory_gib"),
              HasSubstr("unknown key rank.memory_gib; the nearest is rank.memory_gb"));
  EXPECT_THAT(text_of("memory_gb = { is = 2000,", "memory_gb = { is = 0.01,"),
              HasSubstr("host.memory_gb must be from 0.1 to 1000000; got 0.01"));
  EXPECT_THAT(text_of("bf16_tflops = { is = 989,", "bf16_tflops = { is = nan,"),
              HasSubstr("rank.bf16_tflops must be from 0.001 to 100000; got nan"));
  EXPECT_THAT(text_of("fp8_tflops = { is = 1979,", "fp8_tflops = { is = 197,"),
              HasSubstr("rank.fp8_tflops must be 0 where there are no such products, or at least rank.bf16_tflops = "
                        "989; got 197"));
  EXPECT_THAT(text_of("multiprocessors = { is = 132,", "multiprocessors = { is = 0,"),
              HasSubstr("rank.multiprocessors must be at least 1 where machine.device is \"cuda\"; got 0"));
  EXPECT_THAT(text_of("f32_tflops = { is = 67,", "f32_tflops = { is = 67000,"),
              HasSubstr("must be at most rank.bf16_tflops = 989; got 67000"));
  EXPECT_THAT(refused([&] { parse_machine(good.substr(0, good.find("[links]")), "m.toml"); }),
              HasSubstr("expected links.domain_ranks, links.inside_gb_s, links.across_gb_s, links.inside_us, "
                        "links.across_us, host.layer_us, host.link_gb_s, host.memory_gb, host.read_gb_s, "
                        "host.write_gb_s, host.ranks; they are missing"));
  EXPECT_THAT(text_of("inside = { is = 0", "inside = { is = 2"), HasSubstr("share.moebius.inside must be from 0.001"));
  EXPECT_THAT(text_of("[links]", "[host]"), HasSubstr("m.toml"));
  EXPECT_THAT(text_of("products = { is", "products = { was"), HasSubstr("must be { is = NUMBER, from = \"SOURCE\" }"));
  EXPECT_THAT(text_of("device = \"cuda\"", "device = \"tpu\""),
              HasSubstr("machine.device must be \"cpu\" or \"cuda\""));
  EXPECT_THAT(text_of("domain_ranks = { is = 8,", "domain_ranks = { is = 2.5,"),
              HasSubstr("links.domain_ranks must be a whole number; got 2.5"));
  EXPECT_THAT(text_of("name = \"NVIDIA H100 SXM\"", "name = \"a\\nb\""),
              HasSubstr("machine.name must have no control characters; got \"a\\nb\""));
  PlanMachine odd = load_machine("h100", kMachines);
  odd.name = "a \"b\"\\";
  EXPECT_EQ(parse_machine(to_toml(odd), "m.toml").name, odd.name);
  const size_t line = good.find("memory_tb_s"), end = good.find('\n', line);
  EXPECT_THAT(refused([&] { parse_machine(good.substr(0, line) + good.substr(end + 1), "m.toml"); }),
              HasSubstr("expected rank.memory_tb_s; it is missing"));
  EXPECT_THAT(text_of("from = \"one network card a GPU, 400 Gb/s\"", "from = \"\""), HasSubstr("has no source"));
}

// A rank with one of two threads has half of the machine, which it shares with another rank.
TEST(Machines, AreSharedByRanksOfACpu) {
  const PlanMachine whole = load_machine("xeon2", kMachines), half = whole.of_rank(1);
  EXPECT_DOUBLE_EQ(half.bf16_tflops, whole.bf16_tflops / 2);
  EXPECT_DOUBLE_EQ(half.memory_gb, whole.memory_gb / 2);
  EXPECT_EQ(half.domain_ranks, 2);
  EXPECT_EQ(whole.of_rank(2).domain_ranks, 1);
  EXPECT_DOUBLE_EQ(whole.of_rank(8).bf16_tflops, whole.bf16_tflops);
  const PlanMachine gpu = load_machine("h100", kMachines);
  EXPECT_DOUBLE_EQ(gpu.of_rank(1).memory_gb, gpu.memory_gb);
  EXPECT_THAT(
      refused([&] { parse_machine(replaced(to_toml(whole), "threads = { is = 2", "threads = { is = 0"), "m.toml"); }),
      HasSubstr("rank.threads must be at least 1 where machine.device is \"cpu\""));
}

// Divisions that are not exact in floating point lose no rank.
TEST(Machines, HaveAsManyRanksAsTheirThreadsAllow) {
  PlanMachine cpu = load_machine("xeon2", kMachines);
  for (const int64_t ranks : {93, 99, 105, 210}) {
    cpu.threads = static_cast<double>(ranks);
    EXPECT_EQ(cpu.of_rank(1).domain_ranks, static_cast<double>(ranks));
  }
}

TEST(Machines, AssumedFiguresAreListed) {
  const PlanMachine m = load_machine("h100", kMachines);
  EXPECT_THAT(m.assumed_figures(), testing::Contains(HasSubstr("links.across_us: assumed")));
  for (const std::string& figure : m.assumed_figures()) EXPECT_EQ(figure.find("bf16_tflops"), std::string::npos);
}

// A machine that was not measured gets the shares of its family, and says so.
TEST(Machines, RatesAreThoseOfTheLinksTimesTheirShares) {
  PlanMachine m = machine("h100");
  m.across_gb_s = 50, m.inside_gb_s = 400, m.across_us = 30, m.inside_us = 10;
  m.of(PlanSystem::moebius)[static_cast<size_t>(Share::across)] = 0.5;
  m.of(PlanSystem::moebius)[static_cast<size_t>(Share::inside)] = 0.75;
  const ExchangeRates rates = m.exchange_rates();
  EXPECT_DOUBLE_EQ(rates.across_bytes_s, 25e9);
  EXPECT_DOUBLE_EQ(rates.inside_bytes_s, 300e9);
  EXPECT_DOUBLE_EQ(rates.across_call_s, 30e-6);
  EXPECT_DOUBLE_EQ(rates.inside_call_s, 10e-6);
  EXPECT_EQ(rates.source, "those of the machine file \"NVIDIA H100 SXM\"");
  EXPECT_THAT(machine("xeon2").exchange_rates().source, testing::EndsWith(", whose links.across_gb_s is assumed"));
}

TEST(Machines, KeepTheSourceOfAnotherMachineInAFit) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_dense_3b.toml");
  FitRow row{.name = "dense", .source = "made", .family = "hopper", .relatives = {"h200", "h800"}, .run = run};
  row.machine = "h200";
  row.measured = 1.1 * predict(parts, run, 1, machine("h200"), {}).model_tflops_per_gpu;
  const FitResult result = fit(parts, {row}, {{"h200", machine("h200")}, {"h800", machine("h800")}}, false);
  const PlanMachine &measured = result.machines.at("h200"), &other = result.machines.at("h800");
  const std::string products = "share.moebius.products";
  EXPECT_EQ(measured.sources.at(products), "fitted to measured runs, docs/measurements/plan.md");
  EXPECT_EQ(other.sources.at(products), "that of machines/h100.toml; no H800 was measured");
  EXPECT_GT(other.of(PlanSystem::moebius)[0], machine("h800").of(PlanSystem::moebius)[0]);
}

}  // namespace
}  // namespace moebius

// The run and its engine on the machine of a plan: which kernels for Hopper it has, and what it refuses without them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "plan/cost/usual_machine.h"
#include "plan/predict.h"
#include "plan/search.h"
#include "plan/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

PlanMachine h200(int capability, double fp8_tflops, double nvfp4_tflops = 0) {
  PlanMachine m = machine("h200");
  m.capability = capability, m.fp8_tflops = fp8_tflops, m.nvfp4_tflops = nvfp4_tflops;
  return m;
}

RunSpec small(std::vector<std::string> set) {
  set.emplace_back("model.num_hidden_layers=1");
  return recipe("bench_qwen3_30b_a3b_8layers.toml", set);
}

// `moebius bench machine` writes fp8_tflops = 0: such a file of a Hopper GPU has the kernels, and products in 8 bits
// count at the rate of bf16. Operands are then not widened.
TEST(OnMachine, HopperKernelsAreUsedWithoutAMeasuredFp8Rate) {
  const RunSpec run = small({"precision.recipe=\"fp8_tensor\""});
  const auto predicted = [&](const PlanMachine& m) {
    PartLibrary parts;
    return predict(parts, run, 1, m, {}, {.simulate = false});
  };
  const Prediction known = predicted(h200(90, 1979)), measured = predicted(h200(90, 0)),
                   other = predicted(h200(100, 0));
  EXPECT_TRUE(h200(90, 0).has_hopper_kernels());
  EXPECT_TRUE(run_on(run, h200(90, 0)).precision.has_f8_kernels);
  EXPECT_FALSE(run_on(run, h200(100, 0)).precision.has_f8_kernels);
  EXPECT_EQ(measured.fullest_rank().total(), known.fullest_rank().total());
  EXPECT_GT(other.fullest_rank().total(), known.fullest_rank().total()) << "emulated products have wide operands";
  EXPECT_GT(measured.step_s, known.step_s);
  EXPECT_LT(measured.step_s, other.step_s);
}

// Files from before machine.capability: a GPU with products in 4 bits is no Hopper GPU.
TEST(OnMachine, GpusWithProductsIn4BitsAreNotHopper) {
  EXPECT_TRUE(h200(0, 1979).counts_for_hopper());
  EXPECT_FALSE(h200(0, 4500, 9000).counts_for_hopper());
  EXPECT_FALSE(h200(0, 4500, 9000).has_hopper_kernels());
  EXPECT_FALSE(machine("epyc2").has_hopper_kernels());
}

// Other systems have products in 8 bits of their own, on any GPU.
TEST(OnMachine, OtherSystemsKeepTheirKernels) {
  const RunSpec run = small({"precision.recipe=\"fp8_tensor\""});
  EXPECT_TRUE(run_on(run, machine("gb200"), PlanSystem::megatron).precision.has_f8_kernels);
  EXPECT_FALSE(run_on(run, machine("gb200"), PlanSystem::moebius).precision.has_f8_kernels);
}

const struct {
  std::vector<std::string> set;
  const char* refusal;
} kOfHopper[] = {
    {{"precision.recipe=\"fp8_block\""},
     "precision.recipe = \"fp8_block\" needs a GPU of compute capability 9.0; this one has 10.0; set precision.recipe"},
    {{"optimizer.grad=\"bf16\"", "optimizer.fuse_grad=true"},
     "optimizer.fuse_grad = true needs the kernels of a GPU of compute capability 9.0; this one has 10.0, and "
     "run.kernels is \"auto\"; set optimizer.fuse_grad = false"},
    {{"parallel.ep=2", "parallel.dispatcher=\"direct\"", "parallel.expert_overlap=\"batch_split\""},
     "parallel.expert_overlap = \"batch_split\" in bf16 needs the kernels of a GPU of compute capability 9.0; got one "
     "of 10.0, with run.kernels = \"auto\"; set parallel.expert_overlap to \"layer\" or \"none\""},
};

// The engine would refuse these on the GPU of the machine, so a plan and a search do, with the same message.
TEST(OnMachine, OtherGpusRefuseWhatNeedsHopper) {
  for (const auto& [set, refusal] : kOfHopper) {
    const RunSpec run = small(set);
    const auto planned = [&](const PlanMachine& m, std::vector<std::string> assume) {
      return refused([&, texts = assume] {
        PartLibrary parts;
        predict(parts, run, 2, m, parse_assumptions(texts), {.simulate = false});
      });
    };
    const auto found = [&](const PlanMachine& m) {
      return refused([&] {
        PartLibrary parts;
        search(parts, run, 2, m, {}, {});
      });
    };
    EXPECT_THAT(planned(machine("b200"), {}), HasSubstr(refusal));
    EXPECT_THAT(found(machine("b200")), HasSubstr(refusal));
    EXPECT_EQ(planned(h200(90, 1979), {}), "not refused");
    EXPECT_EQ(planned(h200(0, 4500, 9000), {}), "not refused") << "the capability is not known";
    EXPECT_EQ(planned(machine("b200"), {"system=megatron"}), "not refused");
    EXPECT_EQ(found(machine("h200")), "not refused");
  }
}

// "auto" is predicted as the engine would choose it: direct inside a host, and all-gather across hosts that are no
// whole nodes.
TEST(OnMachine, TheAutomaticDispatcherIsThatOfTheRun) {
  PartLibrary parts;
  const auto step = [&](const char* name, const std::string& dispatcher, int64_t ep) {
    const RunSpec run =
        recipe("bench_olmoe_1b_7b.toml", {fmt::format("parallel.ep={}", ep), "parallel.dispatcher=" + dispatcher});
    return predict(parts, run, 8, machine(name), {}).step_s;
  };
  for (const int64_t ep : {2, 8}) {
    EXPECT_EQ(step("h200", "auto", ep), step("h200", "direct", ep));
  }
  PlanMachine pairs = machine("h200");
  pairs.domain_ranks = 2;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"parallel.ep=4"});
  EXPECT_EQ(dispatcher_on(run, 8, machine("h200")).name, "direct");
  EXPECT_EQ(dispatcher_on(run, 8, pairs).name, "allgather");
  EXPECT_EQ(step("gb200", "auto", 4), step("gb200", "direct", 4)) << "a tray has 4 of the domain's 72 GPUs";
  EXPECT_EQ(step("gb200", "auto", 8), step("gb200", "allgather", 8)) << "8 GPUs are on two trays";
}

// The machines of h100 are nodes of 8 ranks. The prediction of a step agrees with the choice.
TEST(OnMachine, TheAutomaticDispatcherAcrossNodesIsNearlyTheFastest) {
  PartLibrary parts;
  const PlanMachine h100 = machine("h100");
  const auto run = [](const std::string& dispatcher) {
    return recipe("deepseek_v3_1024_h100.toml", {"parallel.dispatcher=" + dispatcher});
  };
  const auto step = [&](const std::string& dispatcher) {
    return predict(parts, run(dispatcher), 1024, h100, {}, {.simulate = false}).step_s;
  };
  EXPECT_LT(step("auto"), 1.1 * std::min(step("two_level"), step("allgather")));
  EXPECT_THAT(
      dispatcher_on(run_on(run("auto"), h100), 1024, h100).reason,
      HasSubstr("; rates: 40 GB/s across nodes and 309 GB/s inside, those of the machine file \"NVIDIA H100 SXM\""));
}

TEST(OnMachine, ASearchFindsTwoLevelOverSeveralHosts) {
  PartLibrary parts;
  const RunSpec run =
      recipe("bench_olmoe_1b_7b.toml", {"parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "parallel.ep=16",
                                        "parallel.etp=1", "train.micro_batch=1", "train.global_batch=16"});
  const SearchResult found = search(parts, run, 16, machine("h200"), {}, {.keep = 1});
  EXPECT_EQ(found.layouts.at(0).prediction.ranks, 16);
  EXPECT_THAT(found.layouts.at(0).set, testing::Contains("parallel.dispatcher=\"two_level\""));
}

// Runs without a machine file compare by these, and memory is planned for a machine with the same.
TEST(OnMachine, UsualRatesAreThoseOfTheUsualMachine) {
  for (const bool on_gpu : {false, true}) {
    const ExchangeRates usual = usual_exchange_rates(on_gpu), machine = usual_machine(on_gpu, 0).exchange_rates();
    EXPECT_DOUBLE_EQ(usual.across_bytes_s, machine.across_bytes_s);
    EXPECT_DOUBLE_EQ(usual.inside_bytes_s, machine.inside_bytes_s);
    EXPECT_DOUBLE_EQ(usual.across_call_s, machine.across_call_s);
    EXPECT_DOUBLE_EQ(usual.inside_call_s, machine.inside_call_s);
  }
}

}  // namespace
}  // namespace moebius

#include "plan/cost/row_exchange.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

struct MeasuredDispatch {
  int64_t ep;
  double hybridep_us, alltoall_us;  // Megatron Core's paper, Table 7
};

// Returns the microseconds of a dispatch of 4096 tokens of DeepSeek-V3, in bf16.
double dispatch_us(const char* name, int64_t ep, PlanDispatcher dispatcher) {
  const PlanMachine m = machine(name);
  const RunSpec run = recipe("deepseek_v3.toml", {fmt::format("parallel.ep={}", ep), "train.micro_batch=1"});
  const EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, static_cast<int>(ep)));
  Assumptions assume;
  assume.system = PlanSystem::megatron;
  assume.dispatcher = dispatcher;
  return 1e6 * rows_sent({.machine = m, .assume = assume, .spec = spec}, RowDirection::to_experts).seconds;
}

void expect_measured(const char* name, const std::vector<MeasuredDispatch>& measured, double error) {
  for (const MeasuredDispatch& d : measured) {
    EXPECT_NEAR(dispatch_us(name, d.ep, PlanDispatcher::hybridep) / d.hybridep_us, 1, error) << name << ", ep " << d.ep;
    EXPECT_NEAR(dispatch_us(name, d.ep, PlanDispatcher::alltoall) / d.alltoall_us, 1, error) << name << ", ep " << d.ep;
  }
}

// The shares of links begin near these times before runs are fitted. Across domains of 8 GPUs all-to-all sends each row,
// and HybridEP each token once.
TEST(RowExchange, OfOtherDispatchersIsWithin9PercentOnH100And25OnGb200) {
  expect_measured("h100", {{8, 661, 1265}, {16, 1485, 5774}, {32, 3064, 8059}, {64, 4626, 9164}}, 0.09);
  expect_measured("gb200", {{8, 391, 735}, {16, 578, 743}, {32, 612, 769}, {64, 675, 930}}, 0.25);
}

// Two H200 sent 3.77 GiB each in a step with moe.force_balance, half of what tokens of a router would.
TEST(RowExchange, OfAnEvenLoadAreFewer) {
  PartLibrary parts;
  const auto sent = [&](const std::vector<std::string>& load) {
    std::vector<std::string> sets{"model.num_hidden_layers=6", "parallel.ep=2", "parallel.dispatcher=\"direct\""};
    sets.insert(sets.end(), load.begin(), load.end());
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", sets);
    return predict(parts, run, 2, machine("h200"), {}, {.simulate = false}).axes.at("ep").bytes / (1 << 30);
  };
  EXPECT_NEAR(sent({"moe.force_balance=true", "moe.balance=\"none\"", "moe.aux_coeff=0"}), 3.77, 0.02);
  EXPECT_NEAR(sent({}), 2 * 3.77, 0.05);
}

// With nvfp4 a dispatch also sends the index of each token, in the first of 2 L i32 that replace its routes
// (DirectDispatcher::dispatch_index). L: the most experts of a token on one rank. Each rank that has some of a token's
// experts gets a row of 2048 bf16 and returns one. It gets 8 bytes for each pair of a token and an expert before, and
// 4 EP bytes of counts.
TEST(RowExchange, OfNvfp4CountsTheIndicesOfTokens) {
  struct Case {
    int64_t ep;
    double most_experts;  // OLMoE has 64 experts, of which a token has 8
  };
  for (const Case& each : {Case{2, 8}, Case{16, 4}}) {
    const auto bytes = [&](const char* precision) {
      const RunSpec run = recipe("bench_olmoe_1b_7b.toml",
                                 {precision, fmt::format("parallel.ep={}", each.ep), "parallel.dispatcher=direct",
                                  "train.micro_batch=1", "train.seq_len=4096", "train.global_batch=64"});
      EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, static_cast<int>(each.ep)));
      spec.dispatcher = DispatcherKind::direct;
      const PlanMachine h200 = machine("h200");
      const Assumptions assume;
      const TimeContext c{.machine = h200, .assume = assume, .spec = spec};
      EXPECT_EQ(rows_sent(c, RowDirection::to_experts).wire_bytes, rows_sent(c, RowDirection::back).wire_bytes);
      return std::pair(forward_rows_sent(c).wire_bytes, backward_rows_sent(c).wire_bytes);
    };
    const auto plain = bytes("precision.recipe=none"), drawn = bytes("precision.recipe=nvfp4");
    const double W = static_cast<double>(each.ep), pairs = 4096 * 8 * (W - 1) / W;
    const double rows = (plain.first - 8 * pairs - 4 * W * (W - 1)) / (2 * 2048 * 2);
    EXPECT_NEAR(drawn.first - plain.first, rows * 2 * each.most_experts * 4, 1e-6 * plain.first);
    EXPECT_EQ(drawn.second, plain.second);
  }
}

}  // namespace
}  // namespace moebius

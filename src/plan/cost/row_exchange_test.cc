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

// A fit begins with shares of links that give about these times. Across domains of 8 GPUs all-to-all sends each row,
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

// Rows and their gradients are summed in the dtype of the computation, and gradients of weights in the optimizer's.
TEST(RowExchange, SumsHaveTheDtypeOfWhatTheyAdd) {
  const PlanMachine m = machine("h100");
  const Assumptions assume;
  EngineSpec spec;
  spec.mesh = {.dp = 16, .ep = 16};
  spec.optimizer.emplace();
  for (const DType compute : {DType::f32, DType::bf16}) {
    spec.precision.compute = compute;
    spec.optimizer->grad = GradFormat::f32;
    const TimeContext c{.machine = m, .assume = assume, .spec = spec};
    EXPECT_EQ(span_of_messages(c, {.axis = Axis::ep, .call = GroupCall::reduce_scatter}).sums, compute);
    EXPECT_EQ(span_of_gradients(spec, Axis::dp_cp).sums, DType::f32);
  }
  spec.optimizer->grad = GradFormat::bf16;
  EXPECT_EQ(span_of_gradients(spec, Axis::dp_cp).sums, DType::bf16);
}

// With nvfp4 a dispatch also sends the index of each token, in the first of 2 L i32 that replace its routes
// (DirectDispatcher::dispatch_index). L: the most experts of a token on one rank. A token has 8 of OLMoE's 64
// experts, so a rank with n experts gets it with the probability 1 - C(64 - n, 8) / C(64, 8), or on two ranks always.
TEST(RowExchange, OfNvfp4CountsTheIndicesOfTokens) {
  struct Case {
    int64_t ep;
    double most_experts;
    double misses;  // C(64 - n, 8) / C(64, 8) for n = 64 / ep, unless every token is sent
  };
  for (const Case& each : {Case{2, 8, 0}, Case{16, 4, 8814960.0 / 15249024.0}}) {
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
    const double rows = 4096.0 * static_cast<double>(each.ep - 1) * (1 - each.misses);
    EXPECT_NEAR((drawn.first - plain.first) / (rows * 2 * each.most_experts * 4), 1, 1e-6);
    EXPECT_EQ(drawn.second, plain.second);
  }
}

}  // namespace
}  // namespace moebius

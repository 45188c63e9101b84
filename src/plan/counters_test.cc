// The costs that benchmarks, traces and the planner read, against the counters of a real step: its ops, the
// bytes that its groups sent, and the messages that its transport carried.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "comm/transport/counting_testing.h"
#include "comm/transport/threads.h"
#include "core/trace.h"
#include "engine/engine.h"
#include "plan/predict.h"

namespace moebius {
namespace {

const std::string kSource = MOEBIUS_SOURCE_DIR;

// The planner leaves out the values exchanged at the end of a step: losses, the norm, loads of routers, and parts of one value.
bool is_planned(int64_t num_bytes) { return num_bytes != 0 && num_bytes != 8 && num_bytes != 24 && num_bytes != 32; }

struct Counted {
  std::map<std::string, OpTotal> ops;
  std::map<std::string, double> bytes;  // that the rank sent, by axis
  int64_t messages = 0;
};

// Returns the second of two steps of a rank.
Counted counted_step(const RunSpec& run, Transport& world) {
  testing::CountingTransport counting(world, is_planned);
  EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, world.size()));
  spec.world = &counting;
  Engine engine(spec);
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
  for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) engine.batch(m).training = true;
  engine.step(1, run.optimizer.lr);
  engine.end_of_step();
  Trace trace;
  engine.set_trace(&trace);
  const auto sent = [&](int axis) { return static_cast<double>(engine.mesh().sent_bytes(static_cast<Axis>(axis))); };
  std::vector<double> before;
  for (int axis = 0; axis < kNumAxes; ++axis) before.push_back(sent(axis));
  Counted counted;
  const int64_t messages = counting.sent;
  engine.step(2, run.optimizer.lr);
  counted.messages = counting.sent - messages;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const double bytes = sent(axis) - before[static_cast<size_t>(axis)];
    if (bytes > 0) counted.bytes[std::string(name_of(static_cast<Axis>(axis)))] = bytes;
  }
  counted.ops = trace.totals();
  return counted;
}

// Returns the ops of a step on the null device, whose costs the planner adds up.
std::map<std::string, OpTotal> dry_step(const RunSpec& run, int rank, int ranks) {
  EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, ranks));
  const auto world = make_dry_run_transport(rank, ranks);
  spec.device = DeviceKind::null;
  spec.world = world.get();
  Engine engine(spec);
  Trace trace;
  for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) engine.batch(m).training = true;
  engine.step(1, run.optimizer.lr);
  engine.set_trace(&trace);
  engine.step(2, run.optimizer.lr);
  return trace.totals();
}

bool writes_to_others(const RunSpec& run) {
  return run.parallel.dispatcher == DispatcherKind::direct || run.parallel.dispatcher == DispatcherKind::two_level;
}

// All-to-all announces its counts of 8 experts in messages that are as short as the loads of routers, one for each
// layer and micro-batch.
double unseen_messages(const RunSpec& run) {
  if (run.parallel.dispatcher != DispatcherKind::alltoall) return 0;
  const int64_t ranks = run.parallel.ep * run.parallel.etp;
  return static_cast<double>(run.model.num_moe_layers() * run.train.global_batch / (run.train.micro_batch * ranks));
}

class Counters : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(Counters, OfARealStepEqualThePlan) {
  std::vector<std::string> set{"run.threads=1", "parallel.overlap=false"};
  set.insert(set.end(), GetParam().begin(), GetParam().end());
  const RunSpec run = load_run_spec(kSource + "/recipes/tiny_cpu.toml", set);
  const int ranks = static_cast<int>(std::max<int64_t>(2, run.parallel.ep * run.parallel.etp));
  std::vector<Counted> counted(static_cast<size_t>(ranks));
  run_threads(ranks, {.timeout_s = 60},
              [&](Transport& world) { counted[static_cast<size_t>(world.rank())] = counted_step(run, world); });
  for (int rank = 0; rank < ranks; ++rank) {
    for (const auto& [name, dry] : dry_step(run, rank, ranks)) {
      if (name.find(' ') != std::string::npos) continue;  // a call of a group
      // On CPUs the sums that return to a token's rank are computed by the op that adds the rows.
      if (name == "combine" && writes_to_others(run)) continue;
      const OpTotal& real = counted[static_cast<size_t>(rank)].ops[name];
      EXPECT_EQ(real.calls, dry.calls) << name;
      EXPECT_DOUBLE_EQ(real.cost.flops, dry.cost.flops) << name;
      EXPECT_DOUBLE_EQ(real.cost.bytes, dry.cost.bytes) << name;
      EXPECT_DOUBLE_EQ(real.cost.weight_bytes, dry.cost.weight_bytes) << name;
    }
  }
  PartLibrary parts;
  const Prediction p = predict(parts, run, ranks, load_machine("xeon2", kSource + "/machines"), {});
  // The planner counts a rank inside a pipeline, which sends both ways; of two ranks each sends one.
  const bool is_pipeline = run.parallel.pp > 1;
  const auto of_ranks = [&](auto&& value) {
    const double first = value(counted[0]), second = value(counted[1]);
    return is_pipeline ? first + second : std::max(first, second);
  };
  if (ranks == 2) {
    const double messages = of_ranks([](const Counted& c) { return static_cast<double>(c.messages); });
    EXPECT_EQ(p.messages - unseen_messages(run), messages);
  }
  const double kNumbers = 192 * (ranks - 1);  // bytes of the values exchanged at the end of a step
  for (const auto& [axis, planned] : p.axes) {
    const double bytes = of_ranks([&](const Counted& c) {
      double sum = 0;
      for (const std::string& name : {axis, axis + "_back"}) sum += c.bytes.contains(name) ? c.bytes.at(name) : 0;
      return sum;
    });
    EXPECT_NEAR(planned.bytes, bytes, kNumbers) << axis;
  }
}

// Every token chooses all experts, so that the rows that leave a rank are known.
std::vector<std::string> all_experts(int ep, std::vector<std::string> more) {
  more.insert(more.begin(), {fmt::format("parallel.ep={}", ep), "model.num_experts_per_tok=8"});
  return more;
}

// Rows and weights in 8 bits are sent with their scales.
std::vector<std::string> in_8_bits(std::vector<std::string> more) {
  more.insert(more.begin(), {"precision.recipe=\"fp8_block\"", "precision.dispatch=\"recipe\"",
                             "precision.weights=\"recipe\"", "optimizer.master=\"f32\""});
  return more;
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, Counters,
    ::testing::Values(std::vector<std::string>{},
                      std::vector<std::string>{"parallel.ep=2", "parallel.dispatcher=\"allgather\""},
                      std::vector<std::string>{"parallel.tp=2"}, std::vector<std::string>{"optimizer.name=\"muon\""},
                      std::vector<std::string>{"model.qk_norm=false", "optimizer.qk_clip=100"},
                      std::vector<std::string>{"optimizer.name=\"muon\"", "parallel.tp=2", "parallel.etp=2",
                                               "parallel.dispatcher=\"allgather\""},
                      std::vector<std::string>{"parallel.pp=2", "parallel.layout=\"E t | t*2 L\""},
                      all_experts(2, {"parallel.dispatcher=\"alltoall\""}),
                      all_experts(2, {"parallel.dispatcher=\"direct\""}),
                      all_experts(2, {"parallel.dispatcher=\"direct\"", "memory.recompute=[\"layer\"]"}),
                      all_experts(2, {"parallel.dispatcher=\"direct\"", "parallel.expert_overlap=\"batch_split\""}),
                      all_experts(2, {"parallel.dispatcher=\"two_level\"", "parallel.ranks_per_node=1"}), in_8_bits({}),
                      in_8_bits({"parallel.ep=2", "parallel.dispatcher=\"allgather\""}),
                      in_8_bits(all_experts(2, {"parallel.dispatcher=\"alltoall\""})),
                      in_8_bits(all_experts(2, {"parallel.dispatcher=\"direct\""})),
                      in_8_bits(all_experts(2, {"parallel.dispatcher=\"two_level\"", "parallel.ranks_per_node=1"})),
                      in_8_bits(all_experts(4, {"parallel.dispatcher=\"two_level\"", "parallel.ranks_per_node=2",
                                                "train.global_batch=8"}))));

// With parallel.expert_overlap = "batch_split" a step computes each row once, and reads the weights for each part.
TEST(Counters, BatchSplitReadsWeightsTwice) {
  const auto ops = [](const std::string& overlap) {
    const RunSpec run = load_run_spec(
        kSource + "/recipes/tiny_cpu.toml",
        all_experts(2, {"run.threads=1", "parallel.dispatcher=\"direct\"", "parallel.expert_overlap=" + overlap}));
    std::map<std::string, OpTotal> totals;
    run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
      const Counted counted = counted_step(run, world);
      if (world.rank() == 0) totals = counted.ops;
    });
    return totals;
  };
  const auto whole = ops("none"), parts = ops("batch_split");
  constexpr double kRankExperts = 4, kColumns = 32, kWidth = 32, kF32 = 4;  // of the recipe
  const double w2 = kRankExperts * kColumns * kWidth * kF32;
  const std::pair<const char*, double> read[] = {{"expert_up", 2 * w2}, {"expert_down", w2}, {"d_expert_down", w2}};
  for (const auto& [name, weights] : read) {
    const OpTotal &all = whole.at(name), &split = parts.at(name);
    EXPECT_GT(all.calls, 0) << name;
    EXPECT_EQ(split.calls, 2 * all.calls) << name;
    EXPECT_DOUBLE_EQ(all.cost.weight_bytes, static_cast<double>(all.calls) * weights) << name;
    EXPECT_DOUBLE_EQ(split.cost.weight_bytes, 2 * all.cost.weight_bytes) << name;
    EXPECT_DOUBLE_EQ(split.cost.flops, all.cost.flops) << name;
    EXPECT_DOUBLE_EQ(split.cost.bytes, all.cost.bytes + static_cast<double>(all.calls) * weights) << name;
  }
  EXPECT_EQ(parts.at("d_expert_up").calls, whole.at("d_expert_up").calls) << "it has all rows at once";
}

}  // namespace
}  // namespace moebius

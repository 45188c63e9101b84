// The times of collectives, of routed rows and of QK-clip.
#include "plan/work_time.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "plan/cost/megatron_bytes.h"
#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// Seconds of collectives of 128 MiB in f32 on two and four H200, as docs/measurements/performance/several-gpus.md
// has them.
TEST(WorkTime, OfCollectivesOnTwoAndFourGpus) {
  PlanMachine m = machine("h200");
  m.of(PlanSystem::moebius)[static_cast<size_t>(Share::inside)] = 311.0 / 450;
  const EngineSpec spec;
  const Assumptions assume;
  const TimeContext c{.machine = m, .assume = assume, .spec = spec};
  constexpr double kBytes = 128 * 1024 * 1024;
  const auto milliseconds = [&](int64_t n, GroupCall call) {
    const double wire = kBytes * static_cast<double>(n - 1) / static_cast<double>(n);
    return 1e3 * group_seconds(c, {n, 1}, call, call == GroupCall::all_reduce ? 2 * wire : wire);
  };
  const auto expect_near = [&](int64_t n, GroupCall call, double measured) {
    EXPECT_NEAR(milliseconds(n, call), measured, 0.12 * measured) << n << " ranks, call " << static_cast<int>(call);
  };
  expect_near(2, GroupCall::all_gather, 0.292);
  expect_near(2, GroupCall::reduce_scatter, 0.382);
  expect_near(2, GroupCall::all_reduce, 0.669);
  expect_near(4, GroupCall::all_gather, 0.363);
  expect_near(4, GroupCall::reduce_scatter, 0.437);
  expect_near(4, GroupCall::all_reduce, 0.803);
  EngineSpec nccl;
  nccl.sums = GpuSums::nccl;
  const TimeContext with_nccl{.machine = m, .assume = assume, .spec = nccl};
  EXPECT_LT(group_seconds(with_nccl, {2, 1}, GroupCall::reduce_scatter, kBytes / 2),
            group_seconds(c, {2, 1}, GroupCall::reduce_scatter, kBytes / 2));
}

// 16 GPUs on two machines of 8. A sum in the order of the ranks first adds each machine, and then sends a fifteenth of
// the bytes to the other machine, on the link of each rank. NCCL's rings cross between machines once.
TEST(WorkTime, OfSumsInRankOrderIsThatOfTheirLevels) {
  PlanMachine m = machine("h100");
  m.memory_tb_s = 1e6;  // the pass that adds takes no time
  const Assumptions assume;
  EngineSpec spec, with_nccl;
  with_nccl.sums = GpuSums::nccl;
  const TimeContext c{.machine = m, .assume = assume, .spec = spec};
  const TimeContext nccl{.machine = m, .assume = assume, .spec = with_nccl};
  const RankSpan span{16, 1};
  constexpr double kWire = 15e9;
  const Shares& shares = m.of(PlanSystem::moebius);
  const double across = m.across_gb_s * 1e9 * shares[static_cast<size_t>(Share::across)];
  const double inside = m.inside_gb_s * 1e9 * shares[static_cast<size_t>(Share::inside)];
  const double latency = (m.across_us + m.inside_us) * 1e-6;
  const double messages = message_time_over_links(8);
  for (const GroupCall call : {GroupCall::reduce_scatter, GroupCall::all_reduce}) {
    EXPECT_NEAR(group_seconds(c, span, call, kWire), latency + 14e9 * messages / inside + 1e9 / across, 1e-4);
    EXPECT_NEAR(group_seconds(nccl, span, call, kWire), m.across_us * 1e-6 + kWire / std::min(inside, 8 * across),
                1e-4);
  }
  // Sums of bf16 are f32 between the machines: an eighth of the bytes.
  EXPECT_NEAR(group_seconds(c, {.size = 16, .sums = DType::bf16}, GroupCall::reduce_scatter, 16e9),
              latency + 14e9 * messages / inside + 2e9 / across, 1e-4);
  // Ranks of 16 machines have no level inside one.
  EXPECT_NEAR(group_seconds(c, {16, 8}, GroupCall::reduce_scatter, kWire), 2 * m.across_us * 1e-6 + kWire / across,
              1e-4);
  // With tp = 2 a machine has 4 ranks of a group of dp, which are added first. A quarter of the bytes goes across.
  const RankSpan with_stride = span_of({.tp = 2, .dp = 8, .edp = 16}, Axis::dp);
  EXPECT_NEAR(group_seconds(c, with_stride, GroupCall::reduce_scatter, 14e9),
              latency + 12e9 * message_time_over_links(4) / inside + 2e9 / across, 1e-4);
  // More than 8 ranks gather by NCCL's ring.
  EXPECT_EQ(group_seconds(c, span, GroupCall::all_gather, kWire),
            group_seconds(nccl, span, GroupCall::all_gather, kWire));
}

// Messages go in levels: 256 ranks have levels of 8, 8 and 4. At level 0 of a reduce-scatter on GPUs a message has the
// part of one rank, and each of 7 members gets those of 32.
TEST(WorkTime, MessagesAreThoseOfTheDevice) {
  const PlanMachine h100 = machine("h100"), xeon = machine("xeon2");
  const Assumptions assume;
  const EngineSpec spec;
  const TimeContext gpus{.machine = h100, .assume = assume, .spec = spec};
  const TimeContext cpus{.machine = xeon, .assume = assume, .spec = spec};
  for (const TimeContext& c : {gpus, cpus}) {
    EXPECT_EQ(group_messages(c, {.size = 8}, GroupCall::all_reduce), 14);
    EXPECT_EQ(group_messages(c, {.size = 8}, GroupCall::all_gather), 7);
    EXPECT_EQ(group_messages(c, {.size = 256}, GroupCall::all_gather), 17);
    EXPECT_EQ(group_messages(c, {.size = 256}, GroupCall::all_to_all), 255);
    EXPECT_EQ(group_messages(c, {.size = 256}, GroupCall::send), 1);
  }
  // Two nodes of 4 ranks each: over NCCL 8 ranks gather in one exchange, and sum in levels.
  const RankSpan of_nodes{.size = 8, .stride = 2, .node = 4};
  EXPECT_EQ(group_messages(cpus, of_nodes, GroupCall::all_gather), 3 + 1);
  EXPECT_EQ(group_messages(gpus, of_nodes, GroupCall::all_gather), 7);
  EXPECT_EQ(group_messages(gpus, of_nodes, GroupCall::all_reduce), 2 * (3 + 1));
  EXPECT_EQ(group_messages(cpus, {.size = 256}, GroupCall::reduce_scatter), 17);
  EXPECT_EQ(group_messages(gpus, {.size = 256}, GroupCall::reduce_scatter), 7 * 32 + 7 + 3);
  EXPECT_EQ(group_messages(cpus, {.size = 256}, GroupCall::all_reduce), 34);
  EXPECT_EQ(group_messages(gpus, {.size = 256}, GroupCall::all_reduce), 34);
}

double memory_seconds(const std::vector<std::string>& set) {
  PartLibrary parts;
  std::vector<std::string> all{"model.num_hidden_layers=2"};
  all.insert(all.end(), set.begin(), set.end());
  return predict(parts, recipe("bench_olmoe_1b_7b.toml", all), 4, machine("h200"), {}, {.simulate = false})
      .kernels.at("memory");
}

// A rank plans rows for the worst case, and its kernels skip those that no token fills.
TEST(WorkTime, OfRoutedRowsIsThatOfRowsInUse) {
  const double alone = memory_seconds({});
  for (const char* dispatcher : {"allgather", "direct"}) {
    const std::string key = std::string("parallel.dispatcher=\"") + dispatcher + "\"";
    EXPECT_LT(memory_seconds({"parallel.ep=4", "memory.expert_rows=0", key}), 1.5 * alone) << dispatcher;
  }
}

// Experts with few rows take the time of reading their weights, and the busiest rank reads no more of these.
TEST(WorkTime, OfExpertsWithFewRowsDoesNotGrowWithThem) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_olmoe_1b_7b.toml",
                             {"model.num_hidden_layers=2", "parallel.ep=4", "train.seq_len=32", "train.micro_batch=1"});
  PlanMachine m = machine("h200");
  m.kernel_us = 0;
  const auto seconds = [&](const char* load) {
    return predict(parts, run, 4, m, parse_assumptions({load}), {.simulate = false}).kernels.at("experts");
  };
  const double even = seconds("load=balanced"), skewed = seconds("load=rank:2");
  EXPECT_GT(skewed, even);
  EXPECT_LT(skewed, 1.1 * even);
}

// A separate kernel recomputes the scores of a forward pass, and the ranks exchange their largest logits.
TEST(WorkTime, OfQkClipIncludesRecomputedScores) {
  PartLibrary parts;
  const auto predicted = [&](std::vector<std::string> set, const char* name) {
    set.insert(set.end(), {"model.num_hidden_layers=2", "model.qk_norm=false"});
    return predict(parts, recipe("bench_olmoe_1b_7b.toml", set), 2, machine(name), {}, {.simulate = false});
  };
  const Prediction plain = predicted({}, "h200"), clipped = predicted({"optimizer.qk_clip=100"}, "h200");
  const double more = clipped.kernels.at("attention_forward") / plain.kernels.at("attention_forward");
  EXPECT_GT(more, 1.2);
  EXPECT_LT(more, 2);
  EXPECT_GT(clipped.phases.at("attention logits"), 0);
  EXPECT_GT(clipped.axes.at("dp_cp").bytes, plain.axes.at("dp_cp").bytes);
  EXPECT_EQ(clipped.messages, plain.messages + 1);
  EXPECT_EQ(plain.phases.count("attention logits"), 0U);
  EXPECT_EQ(predicted({"optimizer.qk_clip=100"}, "xeon2").kernels.at("attention_forward"),
            predicted({}, "xeon2").kernels.at("attention_forward"));
}

// Megatron clamps pre-activations and adds the second biases in passes of their own. Columns of reads and writes, op by
// op: 8 F + 6 D forward, 10 F + 8 D backward, and the clamps again where the activation is recomputed.
TEST(WorkTime, OfExpertsWithBiasesInMegatron) {
  const PlanMachine m = machine("h100");
  const Assumptions assume;
  EngineSpec spec;
  spec.model = {
      .hidden_size = 32, .top_k = 4, .moe_intermediate_size = 16, .expert_proj_bias = true, .swiglu_limit = 7};
  spec.shape = {.batch = 2, .seq = 8};
  const BiasedBytes bytes = biased_bytes({.machine = m, .assume = assume, .spec = spec});
  EXPECT_EQ(bytes.forward, 2 * 64 * (8 * 16 + 6 * 32));
  EXPECT_EQ(bytes.backward, 2 * 64 * (10 * 16 + 8 * 32));
  EXPECT_EQ(bytes.activation, 2 * 64 * 8 * 16);
  spec.model.expert_proj_bias = false;
  EXPECT_EQ(biased_bytes({.machine = m, .assume = assume, .spec = spec}).forward, 0);
  PartLibrary parts;
  const RunSpec run = recipe("bench_gpt_oss_20b_8layers.toml",
                             {"model.num_hidden_layers=2", "train.micro_batch=1", "train.global_batch=1"});
  const auto memory = [&](const std::vector<std::string>& texts) {
    return predict(parts, run, 1, m, parse_assumptions(texts), {.simulate = false}).kernels.at("memory");
  };
  const double rate = m.memory_tb_s * 1e12 * m.of(PlanSystem::megatron)[static_cast<size_t>(Share::memory)];
  const double columns = static_cast<double>(run.train.seq_len * run.model.top_k * run.model.moe_intermediate_size);
  EXPECT_NEAR(memory({"system=megatron", "recompute=activation"}) - memory({"system=megatron"}),
              2 * 2 * columns * (3 + 8) / rate, 1e-9);
}

// The kernels of the demo's model are too small to fill a GPU. A step of 4096 tokens took 2.358 ms on an H100.
TEST(WorkTime, OfSmallKernelsIsInLargePartTheirLaunches) {
  PartLibrary parts;
  const Prediction p = predict(parts, recipe("demo.toml", {}), 1, machine("h100"), {}, {.simulate = false});
  EXPECT_GT(p.step_s, 0.75 * 2.358e-3);
  EXPECT_LT(p.step_s, 2.358e-3);
  EXPECT_GT(p.launch_s, 0.35 * p.step_s);
}

// A window of one tile spans two tiles of keys for each tile of queries.
TEST(WorkTime, OfWindowsCountsWholeTiles) {
  PartLibrary parts;
  PlanMachine m = machine("h200");
  m.memory_tb_s = 1000;  // so that the products decide
  m.kernel_us = 0;
  const auto seconds = [&](int64_t window) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml", {"model.num_hidden_layers=1", "model.model_type=\"moebius\"",
                                                          "model.sliding_window=" + std::to_string(window)});
    return predict(parts, run, 1, m, {}, {.simulate = false}).kernels.at("attention_forward");
  };
  const double narrow = seconds(128), wide = seconds(1024);
  // Keys of a query, fewer for the first ones of a sequence of 4096, and those of one more tile.
  const auto keys = [](double window) { return window - window * (window - 1) / (2 * 4096) + 128; };
  EXPECT_NEAR(narrow / wide, keys(128) / keys(1024), 1e-3);
}

// One of the two pieces of each exchange of tp overlaps with products.
TEST(WorkTime, ExchangesOfTpMayOverlapWithProducts) {
  PartLibrary parts;
  const RunSpec run = recipe("bench_dense_3b.toml", {"parallel.tp=2", "run.graph=false"});
  const auto predicted = [&](std::vector<std::string> texts) {
    texts.emplace_back("system=megatron");
    return predict(parts, run, 8, machine("h100"), parse_assumptions(texts));
  };
  const Prediction plain = predicted({}), overlap = predicted({"tp_overlap=products"});
  const double exposed = plain.axes.at("tp").exposed_s;
  EXPECT_EQ(plain.axes.at("tp").hidden_s, 0);
  EXPECT_NEAR(overlap.axes.at("tp").hidden_s, exposed / 2, 0.05 * exposed);
  EXPECT_LT(overlap.step_s, plain.step_s);
  EXPECT_EQ(plain.phases.contains("host") ? plain.phases.at("host") : 0, 0) << "without experts the host does not wait";
  EXPECT_NE(refused([] { parse_assumptions({"tp_overlap=products"}); }).find("add --assume system=megatron"),
            std::string::npos);
}

// Megatron quantises and multiplies expert by expert, after the host has read the counts of rows.
TEST(WorkTime, MegatronsGpuWaitsForLaunchesOfSmallExperts) {
  EXPECT_EQ(expert_ops(PlanPrecision::from_recipe, false) + expert_ops(PlanPrecision::from_recipe, true), 6);
  EXPECT_EQ(expert_ops(PlanPrecision::mxfp8, false), 2 * (2 + 1 + 2));
  EXPECT_EQ(expert_ops(PlanPrecision::fp8_tensor, true), 2 * (3 + 2));
  PartLibrary parts;
  const auto predicted = [&](int64_t ep, const char* batch, std::vector<std::string> texts) {
    const RunSpec run = recipe("qwen3_30b_a3b.toml", {"model.num_hidden_layers=2", "parallel.ep=" + std::to_string(ep),
                                                      batch, "run.graph=false", "train.global_batch=64",
                                                      "parallel.dispatcher=\"alltoall\"", "run.device=\"cuda\""});
    texts.emplace_back("system=megatron");
    return predict(parts, run, 8, machine("b200"), parse_assumptions(texts), {.simulate = false});
  };
  const auto host = [](const Prediction& p) {
    const auto found = p.phases.find("host");
    return found == p.phases.end() ? 0 : found->second / static_cast<double>(p.num_micro_batches);
  };
  const char *one = "train.micro_batch=1", *four = "train.micro_batch=4";
  const double layers = 2 * 3 * machine("b200").layer_us * 1e-6;
  EXPECT_NEAR(host(predicted(8, four, {})), layers, 1e-9) << "in bf16 products take longer than launches";
  const double quantised = host(predicted(8, one, {"precision=mxfp8"}));
  EXPECT_GT(quantised, 2 * layers);
  EXPECT_LT(host(predicted(8, four, {"precision=mxfp8"})), quantised) << "kernels of more rows hide more launches";
  EXPECT_GT(host(predicted(4, one, {"precision=mxfp8"})), quantised) << "a rank has twice as many experts";
  EXPECT_EQ(host(predicted(8, one, {"precision=mxfp8", "graphs=full"})), 0);
  // 16 experts of 6 ops each, in two layers. The rest of the passes is the ends of the stage.
  const double launched = 2 * (kLayerSeconds + 16 * 6 * kExpertOpSeconds);
  const auto passes = [](const Prediction& p) {
    const double all = p.phases.at("forward") + p.phases.at("backward") + p.phases.at("communication");
    return (all + p.phases.at("host")) / static_cast<double>(p.num_micro_batches);
  };
  const double alone = passes(predicted(8, one, {})), merged = passes(predicted(8, one, {"expert_overlap=merged"}));
  EXPECT_GT(alone, launched);
  EXPECT_LT(alone, 1.5 * launched);
  EXPECT_NEAR(merged - alone, 2 * kMergedSeconds, 1e-9) << "the host is the bound of both";
  EXPECT_LT(predicted(8, one, {"permutation=fused"}).kernels.at("memory"), predicted(8, one, {}).kernels.at("memory"));
}

}  // namespace
}  // namespace moebius

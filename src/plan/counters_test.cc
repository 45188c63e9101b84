// The costs that benchmarks, traces and the planner read, against the counters of a real step: its ops, the
// bytes that its groups sent, and the messages that its transport carried.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <regex>
#include <set>

#include "comm/transport/counting_testing.h"
#include "comm/transport/threads.h"
#include "core/trace.h"
#include "engine/engine.h"
#include "io/files.h"
#include "plan/predict.h"

namespace moebius {
namespace {

const std::string kSource = MOEBIUS_SOURCE_DIR;

// The planner leaves out the values exchanged at the end of a step: losses, the norm, loads of routers, and parts of
// one value. The metrics of routers are sums of E + 1 integers and of 3 numbers for each layer, of which a message
// between two ranks has a half.
std::function<bool(int64_t num_bytes)> is_planned(const RunSpec& run) {
  std::set<int64_t> unplanned{0, 8, 32};  // 32: the counts of all-to-all (unseen_messages())
  const int64_t L = (run.model.num_moe_layers() + run.model.num_mtp_layers) / run.parallel.pp;
  for (const int64_t n : {L * (run.model.num_experts + 1), 3 * L}) unplanned.insert({8 * (n / 2), 8 * ((n + 1) / 2)});
  return [unplanned](int64_t num_bytes) { return !unplanned.contains(num_bytes); };
}

struct Counted {
  std::map<std::string, OpTotal> ops;
  std::map<std::string, double> bytes;  // that the rank sent, by axis
  int64_t messages = 0, of_any_size = 0;
};

// Returns the second of two steps of a rank.
Counted counted_step(const RunSpec& run, Transport& world) {
  testing::CountingTransport all(world), counting(all, is_planned(run));
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
  const int64_t messages = counting.sent, of_any_size = all.sent;
  engine.step(2, run.optimizer.lr);
  counted.messages = counting.sent - messages;
  counted.of_any_size = all.sent - of_any_size;
  for (int axis = 0; axis < kNumAxes; ++axis) {
    const double bytes = sent(axis) - before[static_cast<size_t>(axis)];
    if (bytes > 0) counted.bytes[std::string(name_of(static_cast<Axis>(axis)))] = bytes;
  }
  engine.end_of_step();
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
  engine.end_of_step();
  return trace.totals();
}

bool writes_to_others(const RunSpec& run) {
  return run.parallel.dispatcher == DispatcherKind::direct || run.parallel.dispatcher == DispatcherKind::two_level;
}

// On CPUs return_sums and return_pairs call these ops.
bool is_inside_another(const std::string& op, const RunSpec& run) {
  return writes_to_others(run) && (op == "combine" || op == "rows_to_pairs");
}

// All-to-all announces its counts of 8 experts in messages that are as short as the loads of routers, one for each
// layer and micro-batch.
double unseen_messages(const RunSpec& run) {
  if (run.parallel.dispatcher != DispatcherKind::alltoall) return 0;
  const int64_t ranks = run.parallel.ep * run.parallel.etp;
  return static_cast<double>(run.model.num_moe_layers() * run.train.global_batch / (run.train.micro_batch * ranks));
}

std::vector<Counted> counted_steps(const RunSpec& run, int ranks) {
  std::vector<Counted> counted(static_cast<size_t>(ranks));
  run_threads(ranks, {.timeout_s = 60},
              [&](Transport& world) { counted[static_cast<size_t>(world.rank())] = counted_step(run, world); });
  return counted;
}

// Messages with largest magnitudes may be as short as the values exchanged at the end of a step. Those are the same
// without a recipe. So this adds what a run with a recipe sends beside them.
void add_short_messages(std::vector<Counted>& counted, RunSpec run) {
  if (run.precision.recipe == PrecisionRecipe::none) return;
  run.precision = {.compute = run.precision.compute};
  const std::vector<Counted> plain = counted_steps(run, static_cast<int>(counted.size()));
  for (size_t rank = 0; rank < counted.size(); ++rank) {
    const int64_t left_out = plain[rank].of_any_size - plain[rank].messages;
    counted[rank].messages = counted[rank].of_any_size - left_out;
  }
}

using Settings = std::vector<std::string>;

RunSpec tiny_run(const Settings& more) {
  Settings set{"run.threads=1", "parallel.overlap=false"};
  set.insert(set.end(), more.begin(), more.end());
  return load_run_spec(kSource + "/recipes/tiny_cpu.toml", set);
}

int ranks_of(const RunSpec& run) { return static_cast<int>(std::max<int64_t>(2, run.parallel.ep * run.parallel.etp)); }

class Counters : public ::testing::TestWithParam<Settings> {};

TEST_P(Counters, OfARealStepEqualThePlan) {
  const RunSpec run = tiny_run(GetParam());
  const int ranks = ranks_of(run);
  std::vector<Counted> counted = counted_steps(run, ranks);
  add_short_messages(counted, run);
  for (int rank = 0; rank < ranks; ++rank) {
    const std::map<std::string, OpTotal> dry_ops = dry_step(run, rank, ranks);
    for (const auto& [name, unused] : counted[static_cast<size_t>(rank)].ops) {
      if (is_inside_another(name, run)) continue;
      EXPECT_TRUE(dry_ops.contains(name)) << name << " ran, and the planner does not count it";
    }
    for (const auto& [name, dry] : dry_ops) {
      if (name.find(' ') != std::string::npos) continue;  // a call of a group
      if (is_inside_another(name, run)) continue;
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
  // Bytes of the values exchanged at the end of a step: loads of the routers, and the loss.
  const auto routers = static_cast<double>(run.model.num_moe_layers() + run.model.num_mtp_layers);
  const double num_bytes = 96 * routers * (ranks - 1);
  for (const auto& [axis, planned] : p.axes) {
    const double bytes = of_ranks([&](const Counted& c) {
      double sum = 0;
      for (const std::string& name : {axis, axis + "_back"}) sum += c.bytes.contains(name) ? c.bytes.at(name) : 0;
      return sum;
    });
    EXPECT_NEAR(planned.bytes, bytes, num_bytes) << axis;
  }
}

// Every token chooses all experts, so that the rows that leave a rank are known.
std::vector<std::string> all_experts(int ep, std::vector<std::string> more) {
  more.insert(more.begin(), {fmt::format("parallel.ep={}", ep), "model.num_experts_per_tok=8"});
  return more;
}

// Ranks send the largest magnitudes of operands, with those of two operands of a weight gradient together. With nvfp4
// experts on ranks get the indices of tokens too.
std::vector<std::string> in_shared_scales(const char* recipe, std::vector<std::string> more) {
  more.insert(more.begin(), fmt::format("precision.recipe=\"{}\"", recipe));
  return more;
}

// Rows and weights in 8 bits are sent with their scales.
std::vector<std::string> in_8_bits(std::vector<std::string> more) {
  more.insert(more.begin(), {"precision.recipe=\"fp8_block\"", "precision.dispatch=\"recipe\"",
                             "precision.weights=\"recipe\"", "optimizer.master=\"f32\""});
  return more;
}

std::vector<Settings> layouts() {
  return {
      {},
      {"parallel.ep=2", "parallel.dispatcher=\"allgather\""},
      {"parallel.ep=2", "parallel.dispatcher=\"direct\"", "model.num_experts_per_tok=4"},
      {"parallel.tp=2"},
      {"optimizer.name=\"muon\""},
      {"model.qk_norm=false", "optimizer.qk_clip=100"},
      {"optimizer.name=\"muon\"", "parallel.tp=2", "parallel.etp=2", "parallel.dispatcher=\"allgather\""},
      {"parallel.pp=2", "parallel.layout=\"E t | t*2 L\""},
      all_experts(2, {"parallel.dispatcher=\"alltoall\""}),
      all_experts(2, {"parallel.dispatcher=\"direct\""}),
      all_experts(2, {"parallel.dispatcher=\"direct\"", "memory.recompute=[\"layer\"]"}),
      all_experts(2, {"parallel.dispatcher=\"direct\"", "parallel.expert_overlap=\"batch_split\""}),
      all_experts(
          4, {"parallel.dispatcher=\"direct\"", "parallel.expert_overlap=\"batch_split\"", "train.global_batch=8"}),
      all_experts(2, {"parallel.dispatcher=\"two_level\"", "parallel.ranks_per_node=1"}),
      in_shared_scales("fp8_tensor", {"parallel.tp=2", "precision.weight_gradients=\"compute\""}),
      in_shared_scales("fp8_tensor", {"parallel.ep=2", "parallel.dispatcher=\"allgather\""}),
      in_shared_scales("nvfp4", {"parallel.tp=2", "model.head_dim=16"}),
      in_shared_scales("nvfp4", {"parallel.ep=2", "parallel.dispatcher=\"allgather\""}),
      in_shared_scales("nvfp4", all_experts(2, {"parallel.dispatcher=\"alltoall\""})),
      in_shared_scales("nvfp4", all_experts(2, {"parallel.dispatcher=\"direct\""})),
      in_8_bits({}),
      in_8_bits({"parallel.ep=2", "parallel.dispatcher=\"allgather\""}),
      in_8_bits(all_experts(2, {"parallel.dispatcher=\"alltoall\""})),
      in_8_bits(all_experts(2, {"parallel.dispatcher=\"direct\""})),
      in_8_bits(all_experts(2, {"parallel.dispatcher=\"two_level\"", "parallel.ranks_per_node=1"})),
      in_8_bits(
          all_experts(4, {"parallel.dispatcher=\"two_level\"", "parallel.ranks_per_node=2", "train.global_batch=8"})),
  };
}

// Models, optimizers and keys whose ops no layout has.
std::vector<Settings> features() {
  const std::string bf16 = "precision.compute=\"bf16\"";
  return {
      {"model.qk_norm=false", "model.attention_sinks=true", "model.attention_bias=true", "model.mlp_bias=true",
       "model.router_bias=true", "model.swiglu_limit=7", "model.first_k_dense_replace=0",
       "model.shared_expert_intermediate_size=0"},
      {"model.qk_norm=false", "model.kv_lora_rank=16", "model.q_lora_rank=16", "model.qk_nope_head_dim=8",
       "model.qk_rope_head_dim=4", "model.v_head_dim=8", "model.num_key_value_heads=4",
       "model.num_nextn_predict_layers=1"},
      {"model.qk_norm=\"whole\""},
      {"model.qk_norm=\"whole\"", "parallel.tp=2"},
      {"model.qk_norm=false", "model.clip_qkv=8", "model.tie_word_embeddings=true"},
      {"model.shared_expert_gate=true", "moe.jitter=0.01"},
      {"moe.balance=\"bias\"", "moe.aux_coeff=0", "model.expert_bias=true", "model.scoring_func=\"sigmoid\""},
      {"lora.rank=4", "lora.dropout=0.1", "lora.targets=[\"self_attn.*\", \"mlp.*\"]"},
      {bf16, "lora.rank=8", "lora.targets=[\"mlp.experts.*\"]"},
      {"optimizer.name=\"sgd\""},
      {bf16, "optimizer.master=\"bf16_remainder\""},
      {bf16, "optimizer.master=\"bf16_stochastic\"", "optimizer.grad=\"bf16\""},
      {bf16, "optimizer.state=\"8bit\""},
      {"precision.recipe=\"fp8_tensor\""},
      {"precision.recipe=\"mxfp8\""},
      {"precision.recipe=\"nvfp4\""},
      {"precision.recipe=\"nvfp4\"", "log.precision=true", "parallel.ep=2", "parallel.dispatcher=\"allgather\""},
      {"precision.recipe=\"fp8_block\"", "precision.activations=\"recipe\""},
      {"parallel.fsdp=true", "parallel.shard_gradients=true"},
      {"parallel.cp=2", "parallel.cp_comm=\"ring\""},
      {"parallel.cp=2", "parallel.cp_comm=\"alltoall\""},
      {"parallel.pp=2", "parallel.layout=\"E t | t*2 L\"", "parallel.schedule=\"zb_h1\""},
      {"memory.recompute=[\"norm\", \"qkv\", \"attention\", \"mlp\", \"shared_expert\", \"expert_up\"]"},
      {"memory.expert_rows=0.5", "parallel.ep=2", "parallel.dispatcher=\"allgather\""},
      all_experts(2, {"parallel.etp=2", "parallel.dispatcher=\"alltoall\"", "train.global_batch=8"}),
  };
}

INSTANTIATE_TEST_SUITE_P(Layouts, Counters, ::testing::ValuesIn(layouts()));
INSTANTIATE_TEST_SUITE_P(Features, Counters, ::testing::ValuesIn(features()));

// Returns the names that ops have in a trace, as the sources of src/ops give them to OpScope.
std::set<std::string> names_of_ops() {
  std::set<std::string> names;
  const std::regex scope(R"(OpScope \w+\(\s*\w+,\s*(\w+|"\w+"),)"),
      name(R"re((?:who = |name = |\? |: |\(s, )"(\w+)")re");
  for (const auto& file : std::filesystem::recursive_directory_iterator(kSource + "/src/ops")) {
    if (file.path().extension() != ".cc" || file.path().stem().string().ends_with("_test")) continue;
    const std::string text = read_file(file.path().string());
    bool has_variable = false;
    for (std::sregex_iterator it(text.begin(), text.end(), scope), end; it != end; ++it) {
      const std::string first = (*it)[1];
      if (first.starts_with('"'))
        names.insert(first.substr(1, first.size() - 2));
      else
        has_variable = true;
    }
    if (!has_variable) continue;
    for (std::sregex_iterator it(text.begin(), text.end(), name), end; it != end; ++it) names.insert((*it)[1]);
  }
  return names;
}

TEST(Counters, CoverEveryOpAndGroupCall) {
  std::set<std::string> counted, calls;
  for (const auto& list : {layouts(), features()}) {
    for (const Settings& more : list) {
      const RunSpec run = tiny_run(more);
      const int ranks = ranks_of(run);
      for (const auto& [name, unused] : dry_step(run, ranks - 1, ranks)) {
        const size_t space = name.find(' ');
        (space == std::string::npos ? counted : calls)
            .insert(space == std::string::npos ? name : name.substr(space + 1));
      }
    }
  }
  const std::set<std::string> in_no_step{
      "cached_attention_fwd",
      "draw_tokens",  // generation
      "norm_gemm",
      "norm_router_logits",
      "rotated_attention",
      "token_experts",  // generation of one text on Hopper GPUs
      "fill_normal",
      "rope_table",
      "clear_stash",  // the start of a run
      "join_master",
      "split_master",
      "find_nonfinite",  // checkpoints, and the search for a bad value
      "d_gated_quantised",
      "dequantize",
      "dequantize_transposed",  // GPUs
      "mx_round",               // GPUs, where products of mxfp8 are emulated
      "low_rank_block",         // GPUs, whose products add an adapter's term
      "newton_schulz",          // its steps are ops
  };
  const std::set<std::string> names = names_of_ops();
  EXPECT_GT(names.size(), 100U) << "the sources name their ops in another way";
  for (const std::string& name : names)
    EXPECT_TRUE(counted.contains(name) || in_no_step.contains(name)) << name << " is in no layout or feature above";
  for (const std::string& name : in_no_step) EXPECT_TRUE(names.contains(name)) << name << " is no op";
  EXPECT_THAT(calls, ::testing::UnorderedElementsAre("all_gather", "all_reduce_sum", "all_to_all_v",
                                                     "reduce_scatter_sum", "send"));
}

// With parallel.expert_overlap = "batch_split" a step computes each row once, and reads the weights for each part: two
// parts of two ranks, and three of four.
TEST(Counters, BatchSplitReadsWeightsForEachPart) {
  for (const int ranks : {2, 4}) {
    const auto ops = [&](const std::string& overlap) {
      const RunSpec run = load_run_spec(kSource + "/recipes/tiny_cpu.toml",
                                        all_experts(ranks, {"run.threads=1", "parallel.dispatcher=\"direct\"",
                                                            "parallel.expert_overlap=" + overlap}));
      return counted_steps(run, ranks)[0].ops;
    };
    const auto whole = ops("none"), parts = ops("batch_split");
    const int num_parts = ranks == 2 ? 2 : 3;
    constexpr double kExperts = 8, kColumns = 32, kWidth = 32, kF32 = 4;  // of the recipe
    const double w2 = kExperts / ranks * kColumns * kWidth * kF32;
    const std::pair<const char*, double> read[] = {{"expert_up", 2 * w2}, {"expert_down", w2}, {"d_expert_down", w2}};
    for (const auto& [name, weights] : read) {
      const OpTotal &all = whole.at(name), &split = parts.at(name);
      const auto calls = static_cast<double>(all.calls);
      EXPECT_GT(all.calls, 0) << name;
      EXPECT_EQ(split.calls, num_parts * all.calls) << name;
      EXPECT_DOUBLE_EQ(all.cost.weight_bytes, calls * weights) << name;
      EXPECT_DOUBLE_EQ(split.cost.weight_bytes, num_parts * all.cost.weight_bytes) << name;
      EXPECT_DOUBLE_EQ(split.cost.flops, all.cost.flops) << name;
      EXPECT_DOUBLE_EQ(split.cost.bytes, all.cost.bytes + (num_parts - 1) * calls * weights) << name;
    }
    EXPECT_EQ(parts.at("d_expert_up").calls, whole.at("d_expert_up").calls) << "it has all rows at once";
  }
}

}  // namespace
}  // namespace moebius

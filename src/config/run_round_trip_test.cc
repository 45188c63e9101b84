#include "config/run_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>

#include "config/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(ConfigDiff, NamesKeysThatChangeTraining) {
  const RunSpec a = parse();
  const RunSpec same = parse({"run.dir=x", "run.threads=3", "train.steps=8", "train.eval_every=2", "data.valid=[\"v\"]",
                              "log.every=5", "checkpoint.every=4", "parallel.ep=2", "run.device=cuda"});
  EXPECT_THAT(config_diff(a, same), ElementsAre());
  EXPECT_EQ(train_identity(a), train_identity(same));
  const RunSpec b =
      parse({"run.seed=1", "model.num_experts=8", "optimizer.lr=0.25", "moe.balance=bias", "data.train=[\"p\"]"});
  EXPECT_THAT(config_diff(a, b),
              ElementsAre("run.seed: 0 -> 1", "model.num_experts: 4 -> 8", "model.expert_bias: false -> true",
                          "data.train: [] -> [{prefix = \"p\", weight = 1.0}]", "optimizer.lr: 0.5 -> 0.25",
                          "moe.balance: \"none\" -> \"bias\""));
  EXPECT_NE(train_identity(a), train_identity(b));
  EXPECT_THAT(train_identity(a), HasSubstr("optimizer.lr = 0.5\n"));
}

TEST(ConfigDiff, SameModelFromAFolderAndInlineIsTheSame) {
  const RunSpec inline_spec = parse();
  const ConfigFolder folder(hf_from_model_spec(inline_spec.model).dump());
  const RunSpec from_folder = parse_run_spec(kRest, "r.toml", {"model.hf=" + folder.path()});
  EXPECT_THAT(config_diff(inline_spec, from_folder), ElementsAre());
  EXPECT_EQ(train_identity(inline_spec), train_identity(from_folder));
}

// Random specs for the round trip. Fields get values of their whole range, related or not: to_toml
// does not check.
class RandomSpec {
 public:
  explicit RandomSpec(uint64_t seed) : random_(seed) {}

  RunSpec make() {
    RunSpec s;
    s.dir = text(), s.seed = random_() >> 1, s.device = coin() ? DeviceKind::cpu : DeviceKind::cuda;
    s.threads = upto(99), s.graph = coin(), s.init_from = text();
    s.model = coin() ? moebius() : hub();
    s.data = {.train = datasets(), .valid = datasets(), .tokenizer = text(), .separate_documents = coin()};
    s.data.order_by_cost = s.data.separate_documents && coin();
    s.data.pack_documents = s.data.separate_documents && coin();
    s.train = {1 + upto(99), 1 + upto(99), 1 + upto(99), 1 + upto(99), upto(99), upto(99)};
    if (coin()) s.lora = {upto(64), positive(), 0.5, {"q_proj", "mlp.experts.*"}, text()};
    if (coin()) s.train.freeze = {"*.mlp.gate.*", "model.embed_tokens.weight"};
    s.optimizer = {.lr = positive(),
                   .min_lr = positive(),
                   .warmup_steps = upto(99),
                   .decay_steps = upto(99),
                   .schedule = LrSchedule(upto(3)),
                   .weight_decay = positive(),
                   .beta1 = unit(),
                   .beta2 = unit(),
                   .eps = positive(),
                   .clip = positive(),
                   .qk_clip = positive()};
    s.moe = {.aux = coin(),
             .seq_aux = coin(),
             .global_aux = coin(),
             .bias = s.model.expert_bias && coin(),
             .sinkhorn = coin(),
             .aux_coeff = positive(),
             .z_coeff = positive(),
             .bias_rate = positive(),
             .capacity_factor = 1e6 * unit(),
             .drop_policy = DropPolicy(upto(1)),
             .jitter = unit(),
             .router_f32 = coin(),
             .force_balance = coin()};
    s.parallel = {.tp = 1 + upto(9),
                  .cp = 1 + upto(9),
                  .pp = 1 + upto(9),
                  .vpp = 1 + upto(9),
                  .ep = 1 + upto(9),
                  .etp = 1 + upto(9),
                  .layout = text(),
                  .schedule = PipelineSchedule(upto(1)),
                  .cp_comm = CpComm(upto(3)),
                  .cp_comm_window = coin() ? std::optional(CpComm(upto(3))) : std::nullopt,
                  .dynamic_cp = coin(),
                  .cp_inner = 1 + upto(9),
                  .dispatcher = DispatcherKind(upto(4)),
                  .ranks_per_node = 1 + upto(7),
                  .expert_overlap = ExpertOverlap(upto(2)),
                  .fsdp = coin(),
                  .fsdp_shard = 2 * upto(4),
                  .shard_gradients = coin()};
    s.precision.compute = coin() ? DType::f32 : DType::bf16;
    s.precision.recipe = PrecisionRecipe(upto(4));
    s.precision.weights = PrecisionChoice(upto(1));
    s.precision.weight_copies = coin();
    s.precision.dispatch = PrecisionChoice(upto(1));
    s.precision.activations = PrecisionChoice(upto(1));
    if (coin()) s.precision.keep = {"*.o_proj.weight", "model.layers.0.*"};
    for (const auto& [name, flag] : kRecomputeNames) {
      if (coin())
        s.memory.recompute.*flag = coin();
      else
        s.memory.recompute.ranges.push_back({.what = flag, .first = upto(9), .last = 9 + upto(99)});
    }
    s.memory.offload.layer_input = coin();
    for (const auto& [name, flag] : kRecomputeNames) s.memory.offload.tensors.*flag = coin();
    s.memory.offload.fraction = 1.0 - unit();
    s.offload_weights = coin();
    s.memory.automatic = coin() && coin();
    if (s.memory.automatic) s.memory.recompute = {};
    s.memory.fit_bytes = coin() ? 0 : 1 + upto(int64_t{1} << 40);
    s.optimizer.offload_buffer = coin() ? std::nullopt : std::optional(0.125 * static_cast<double>(upto(9)));
    s.memory.expert_rows = coin() ? std::nullopt : std::optional(0.25 * static_cast<double>(upto(9)));
    s.checkpoint = {upto(99), upto(99), coin(), coin()};
    s.log = {1 + upto(99), coin(), coin(), text()};
    return s;
  }

 private:
  bool coin() { return random_() & 1; }
  int64_t upto(int64_t most) { return static_cast<int64_t>(random_() % (most + 1)); }
  double unit() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  double positive() { return std::exp(std::uniform_real_distribution<double>(-60, 60)(random_)); }
  std::string text() {
    std::string out;
    for (int64_t n = upto(6); n > 0; --n) out += static_cast<char>(upto(127));
    return out;
  }
  std::vector<DatasetSpec> datasets() {
    std::vector<DatasetSpec> list;
    for (int64_t n = upto(3); n > 0; --n) list.push_back({text() + "p", positive()});
    return list;
  }
  ModelSpec moebius() {
    ModelSpec m = tiny_model();
    m.vocab_size = 1 + upto(1000), m.rms_norm_eps = positive(), m.rope_theta = positive(),
    m.routed_scaling_factor = positive();
    m.initializer_range = unit(), m.qk_norm = QkNorm(upto(2)), m.qkv_bias = coin(), m.tie_word_embeddings = coin(),
    m.sliding_window = upto(5);
    m.moe_layers = {coin(), coin(), coin()}, m.score = ScoreFunction(upto(1)), m.group_score = GroupScore(upto(1));
    m.norm_topk_prob = coin(), m.shared_expert_gate = coin(), m.expert_bias = coin(), m.n_group = 1 + upto(3),
    m.topk_group = 1 + upto(3);
    return m;
  }
  // A model read from a config.json. Its source holds the resolved keys, as after a load.
  ModelSpec hub() {
    ModelSpec m = model_spec_from_hf(
        {{"model_type", coin() ? "mixtral" : "qwen3_moe"}, {"note", text()}, {"rope_theta", positive()}}, "c");
    m.source = hf_from_model_spec(m);
    return m;
  }

  std::mt19937_64 random_;
};

TEST(RoundTrip, RandomSpecsReadBackTheSame) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const RunSpec spec = RandomSpec(seed).make();
    const RunSpec again = read_back(spec, seed % 2);
    ASSERT_EQ(without_provenance(again), spec) << "seed " << seed << "\n" << to_toml(spec, false);
    ASSERT_EQ(to_toml(again, false), to_toml(spec, false)) << "seed " << seed;
    ASSERT_EQ(train_identity(again), train_identity(spec)) << "seed " << seed;
  }
}

// A null of a config.json may differ from the default of its family, and TOML has none.
TEST(RoundTrip, QueriesWithoutALatentStayWithout) {
  for (const char* family : {"deepseek_v2", "deepseek_v3"}) {
    SCOPED_TRACE(family);
    RunSpec spec = RandomSpec(1).make();
    spec.moe.bias = false;
    spec.model = model_spec_from_hf({{"model_type", family}, {"q_lora_rank", nullptr}}, "c");
    for (const bool from_file : {false, true}) {
      spec.model.source = {};
      if (from_file) spec.model.source = hf_from_model_spec(spec.model);
      const RunSpec again = read_back(spec, /*with_provenance=*/false);
      EXPECT_EQ(again.model.q_lora_rank, 0);
      EXPECT_THAT(config_diff(spec, again), ElementsAre());
      EXPECT_EQ(train_identity(again), train_identity(spec));
    }
  }
}

}  // namespace
}  // namespace moebius

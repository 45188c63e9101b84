// The two backward passes of a model, each by itself with other passes between, give the bits of both at once: of every
// kind of layer, whether tensors are kept or recomputed.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "core/rng.h"
#include "core/trace.h"
#include "model/model.h"

namespace moebius {
namespace {

constexpr int64_t kMicroBatches = 3, kVocab = 19, kPositions = 8;

struct Case {
  const char* name;
  ModelSpec model;
  RecomputeSpec recompute = {};
  DType dtype = DType::f32;
  std::vector<std::string> freeze = {};
  int64_t chunk = 0;  // rows of a chunk; sequences with more tokens are long
};

ModelSpec dense_model() {
  ModelSpec m;
  m.vocab_size = kVocab;
  m.hidden_size = 12;
  m.num_layers = 2;
  m.num_heads = 4;
  m.num_kv_heads = 2;
  m.head_dim = 6;
  m.intermediate_size = 10;
  m.max_position_embeddings = kPositions;
  m.initializer_range = 0.3;
  m.moe_layers = {false, false};
  return m;
}

ModelSpec moe_model() {
  ModelSpec m = dense_model();
  m.moe_layers = {false, true};
  m.num_experts = 4;
  m.top_k = 2;
  m.moe_intermediate_size = 6;
  m.shared_intermediate_size = 5;
  m.shared_expert_gate = true;
  m.qk_norm = QkNorm::per_head;
  return m;
}

ModelSpec gpt_oss_model() {
  ModelSpec m = moe_model();
  m.shared_intermediate_size = 0;
  m.shared_expert_gate = false;
  m.qk_norm = QkNorm::none;
  m.qkv_bias = m.o_bias = m.attention_sinks = m.router_bias = m.expert_proj_bias = true;
  m.swiglu_limit = 7;
  return m;
}

ModelSpec latent_model(int64_t q_rank) {
  ModelSpec m = moe_model();
  m.qk_norm = QkNorm::none;
  m.num_kv_heads = m.num_heads;
  m.q_lora_rank = q_rank;
  m.kv_lora_rank = 5;
  m.qk_rope_head_dim = 2;
  m.v_head_dim = 4;
  m.o_bias = true;
  return m;
}

ModelSpec mtp_model() {
  ModelSpec m = moe_model();
  m.num_mtp_layers = 2;
  return m;
}

BatchShape shape_of(const ModelSpec& m) {
  return {.batch = 2, .seq = 4, .max_segments = 2, .num_mtp = m.num_mtp_layers};
}

void fill(const Targets& targets, const Rng& rng, uint64_t key) {
  for (int64_t t = 0; t < targets.target_T.numel(); ++t) {
    targets.target_T.ptr<int32_t>()[t] = static_cast<int32_t>(rng.below(static_cast<uint64_t>(t) + 100 * key, kVocab));
    targets.weight_T.ptr<float>()[t] = t % 4 == 3 ? 0.0f : 1.0f;
  }
}

void fill(MicroBatch& b, int64_t m) {
  const Rng rng(5, RngSite::bench, static_cast<uint64_t>(m));
  for (int64_t t = 0; t < b.shape.tokens(); ++t) {
    b.token_T.ptr<int32_t>()[t] = static_cast<int32_t>(rng.below(static_cast<uint64_t>(t), kVocab));
    b.pos_T.ptr<int32_t>()[t] = static_cast<int32_t>(t % b.shape.seq);
    b.doc_start_T.ptr<int32_t>()[t] = 0;
    b.segment_T.ptr<int32_t>()[t] = static_cast<int32_t>(t / b.shape.seq);
  }
  fill(b, rng, 1);
  for (size_t k = 0; k < b.mtp_targets.size(); ++k) fill(b.mtp_targets[k], rng, 2 + k);
  for (int64_t depth = 0; depth <= std::ssize(b.mtp_targets); ++depth) b.scalars.set_loss_scale(depth, 0.125);
  b.scalars.total_tokens = static_cast<double>(kMicroBatches * b.shape.tokens());
  b.store_scalars();
  b.training = true;
}

// A model whose plan has a set of saved tensors for each micro-batch.
class Rig {
 public:
  Rig(const Case& c, bool splits) : plan_(c.recompute), batches_(kMicroBatches) {
    const BatchShape shape = shape_of(c.model);
    for (MicroBatch& batch : batches_) declare_micro_batch(plan_, shape, batch);
    std::vector<HeldStage> stages = whole_model(c.model);
    stages[0].num_saved = kMicroBatches;
    stages[0].splits_backward = splits;
    const PrecisionSpec precision{.compute = c.dtype};
    model_.emplace(ModelContext{.model = c.model,
                                .balance = balance_,
                                .precision = precision,
                                .mesh = mesh_,
                                .plan = plan_,
                                .use = ModelUse::training,
                                .shape = shape,
                                .max_positions = kPositions,
                                .seed = 7,
                                .stages = stages,
                                .freeze = c.freeze,
                                .expert_chunk = c.chunk});
    Stream null(DeviceKind::null, pool_, nullptr, DeviceKind::cpu);
    StepStack counts(DeviceKind::null, nullptr, 0);
    forward(null, counts, 0);
    backward(null, counts, 0);
    plan_.bind(DeviceKind::cpu, counts.high_water());
    for (int64_t m = 0; m < kMicroBatches; ++m) fill(batches_[static_cast<size_t>(m)], m);
    model_->init_state(s_);
    model_->params().init(s_, 7);
  }

  void forward(int64_t m) { forward(s_, plan_.stack(), m); }
  void backward(int64_t m) { backward(s_, plan_.stack(), m); }
  void backward_input(int64_t m) {
    on_stream(s_, plan_.stack(), m, [&](Step& step, const Tensor& dstream_TD) {
      model_->backward_input(step, {.saved_set = m}, dstream_TD);
    });
  }
  void backward_weight(int64_t m) {
    Step step{s_, plan_.stack(), batches_[static_cast<size_t>(m)]};
    model_->backward_weight(step, {.saved_set = m});
  }

  // The ops of a backward pass, and their operations in flops.
  struct Work {
    std::map<std::string, int64_t> ops;
    double flops = 0;
  };
  Work work_of_backward(int64_t m) {
    Trace trace;
    Stream traced(DeviceKind::cpu, pool_, &trace);
    backward(traced, plan_.stack(), m);
    Work work;
    for (const TraceEvent& event : trace.events()) {
      work.flops += event.cost.flops;
      ++work.ops[event.name];
    }
    return work;
  }

  using Results = std::map<std::string, std::vector<std::byte>>;
  Results results() const {
    Results all;
    const auto add = [&](const std::string& name, const Tensor& t) {
      const auto* bytes = static_cast<const std::byte*>(t.data);
      all[name].assign(bytes, bytes + t.num_bytes());
    };
    for (const Param& p : model_->params().all())
      if (p.has_grad) add(p.spec.name, p.dw);
    add("loss", model_->loss_sum());
    if (model_->num_mtp_depths() > 0) add("mtp loss", model_->mtp_loss_sum());
    return all;
  }
  int64_t saved_bytes() const { return plan_.bytes(Life::saved); }
  int64_t stack_bytes() const { return plan_.bytes(Life::stack); }

 private:
  template <class Body>
  void on_stream(Stream& s, StepStack& stack, int64_t m, Body&& body) {
    Step step{s, stack, batches_[static_cast<size_t>(m)]};
    StackScope scope(stack);
    body(step, step.alloc({model_->stream_rows(), model_->spec().hidden_size}, model_->dtype()));
  }
  void forward(Stream& s, StepStack& stack, int64_t m) {
    on_stream(s, stack, m, [&](Step& step, const Tensor& stream_TD) {
      model_->forward(step, {.saved_set = m}, stream_TD, /*with_gradients=*/true);
    });
    Step step{s, stack, batches_[static_cast<size_t>(m)]};
    model_->forward_loss(step, {.saved_set = m}, /*with_gradients=*/true);
  }
  void backward(Stream& s, StepStack& stack, int64_t m) {
    on_stream(s, stack, m,
              [&](Step& step, const Tensor& dstream_TD) { model_->backward(step, {.saved_set = m}, dstream_TD); });
  }

  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  const Mesh mesh_{MeshShape{}};
  MemoryPlan plan_;
  const BalanceSpec balance_{.aux = true, .aux_coeff = 0.05, .z_coeff = 0.01};
  std::deque<MicroBatch> batches_;
  std::optional<Model> model_;
};

Rig::Results results_of(const Case& c) {
  Rig rig(c, /*splits=*/false);
  for (int64_t m = 0; m < kMicroBatches; ++m) {
    rig.forward(m);
    rig.backward(m);
  }
  return rig.results();
}

std::vector<float> floats(const std::vector<std::byte>& bytes) {
  std::vector<float> all(bytes.size() / sizeof(float));
  std::memcpy(all.data(), bytes.data(), all.size() * sizeof(float));
  return all;
}

class BackwardPasses : public testing::TestWithParam<Case> {};

TEST_P(BackwardPasses, SeparatePassesGiveTheBitsOfOnePass) {
  Rig both(GetParam(), /*splits=*/false), apart(GetParam(), /*splits=*/true);
  for (int64_t m = 0; m < kMicroBatches; ++m) {
    both.forward(m);
    both.backward(m);
  }
  // Two forwards and two input passes run before the first weight pass.
  for (const int64_t m : {0, 1}) apart.forward(m);
  apart.backward_input(0);
  apart.forward(2);
  apart.backward_input(1);
  apart.backward_weight(0);
  apart.backward_input(2);
  for (const int64_t m : {1, 2}) apart.backward_weight(m);

  const Rig::Results expected = both.results(), got = apart.results();
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, bytes] : expected) {
    EXPECT_NE(bytes, std::vector<std::byte>(bytes.size())) << name;
    EXPECT_TRUE(got.at(name) == bytes) << name;
  }
}

// In chunks too, where long sequences recompute the projections of attention twice.
TEST(BackwardPassesOfChunks, RecomputeChangesNoBit) {
  for (const ModelSpec& model : {dense_model(), moe_model(), gpt_oss_model(), latent_model(0), latent_model(3)}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Rig::Results want = results_of({.name = "", .model = model, .dtype = dtype, .chunk = 2});
      RecomputeSpec up;
      up.norm = up.qkv = up.mla_up_proj = true;
      for (const RecomputeSpec& recompute : {RecomputeSpec{.layer = true}, RecomputeSpec{.qkv = true}, up})
        EXPECT_TRUE(results_of({.name = "", .model = model, .recompute = recompute, .dtype = dtype, .chunk = 2}) ==
                    want);
    }
  }
}

// Returns the ops that a backward pass has in addition if it recomputes.
std::map<std::string, int64_t> more_ops(const ModelSpec& model, const RecomputeSpec& recompute, int64_t chunk) {
  const auto ops = [&](const RecomputeSpec& spec) {
    Rig rig({.name = "", .model = model, .recompute = spec, .dtype = DType::bf16, .chunk = chunk}, /*splits=*/false);
    rig.forward(0);
    return rig.work_of_backward(0).ops;
  };
  std::map<std::string, int64_t> more = ops(recompute);
  for (const auto& [name, count] : ops({})) more[name] -= count;
  std::erase_if(more, [](const auto& op) { return op.second == 0; });
  return more;
}

// A layer that is recomputed runs each op once whose results backward reads: not the router, nor the down projection
// of the experts and their combination. A long sequence also projects q, k and v once more, and computes their input
// for it and for their weight gradients. The other names keep attention's output: no attention, no output projection.
TEST(BackwardPassesOfChunks, RecomputeRunsOnlyWhatBackwardReads) {
  ModelSpec model = moe_model();
  model.num_layers = 1;
  model.moe_layers = {true};
  model.shared_intermediate_size = 0;
  model.shared_expert_gate = false;
  using Ops = std::map<std::string, int64_t>;
  const Ops whole = more_ops(model, {.layer = true}, 0), in_chunks = more_ops(model, {.layer = true}, 2);
  EXPECT_EQ(
      whole,
      (Ops{{"rms_norm_fwd", 2}, {"gemm", 2}, {"rope_fwd", 1}, {"attention_fwd", 1}, {"add", 1}, {"expert_up", 1}}));
  EXPECT_EQ(
      in_chunks,
      (Ops{{"rms_norm_fwd", 4}, {"gemm", 3}, {"rope_fwd", 1}, {"attention_fwd", 1}, {"add", 1}, {"expert_up", 4}}));
  EXPECT_EQ(more_ops(model, {.norm = true, .qkv = true, .expert_up = true}, 2),
            (Ops{{"rms_norm_fwd", 3}, {"gemm", 1}, {"expert_up", 4}}));
}

// The losses are those of one computation, and so are gradients but for the order of their sums.
TEST(BackwardPassesOfChunks, EqualOneComputation) {
  for (const ModelSpec& model : {dense_model(), moe_model(), gpt_oss_model(), latent_model(0), latent_model(3)}) {
    const Rig::Results whole = results_of({.name = "", .model = model});
    for (const int64_t chunk : {1, 2, 4}) {
      const Rig::Results got = results_of({.name = "", .model = model, .recompute = {.layer = true}, .chunk = chunk});
      ASSERT_EQ(got.size(), whole.size());
      for (const auto& [name, bytes] : whole) {
        if (name == "loss") {
          EXPECT_TRUE(got.at(name) == bytes) << chunk;
          continue;
        }
        const std::vector<float> a = floats(got.at(name)), b = floats(bytes);
        float largest = 0, off = 0;
        for (size_t i = 0; i < a.size(); ++i)
          largest = std::max(largest, std::abs(b[i])), off = std::max(off, std::abs(a[i] - b[i]));
        EXPECT_LE(off, 2e-6f * largest) << name << " in chunks of " << chunk;
      }
    }
  }
}

// Tensors between the two passes are kept if the passes are separate; else they are on the step stack.
TEST_P(BackwardPasses, SeparatePassesSaveTensorsOutsideTheStepStack) {
  const Rig both(GetParam(), /*splits=*/false), apart(GetParam(), /*splits=*/true);
  EXPECT_GT(apart.saved_bytes(), both.saved_bytes());
  EXPECT_LT(apart.stack_bytes(), both.stack_bytes());
}

// A plan for separate passes can also run both as one.
TEST_P(BackwardPasses, OnePassInAPlanForSeparatePassesGivesTheSameBits) {
  Rig both(GetParam(), /*splits=*/false), kept(GetParam(), /*splits=*/true);
  for (Rig* rig : {&both, &kept}) {
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      rig->forward(m);
      rig->backward(m);
    }
  }
  EXPECT_TRUE(both.results() == kept.results());
}

// The gradients of trained parameters keep their bits, and the passes below are not computed.
struct Lowest {
  const char* name;
  ModelSpec model;
  std::vector<std::string> freeze;
  int64_t gemms;  // of a backward pass
};
void PrintTo(const Lowest& p, std::ostream* out) { *out << p.name; }
class LowestTrained : public testing::TestWithParam<Lowest> {};

TEST_P(LowestTrained, NothingIsComputedBelow) {
  const Lowest& p = GetParam();
  Rig all({.name = p.name, .model = p.model}, /*splits=*/false),
      some({.name = p.name, .model = p.model, .freeze = p.freeze}, /*splits=*/false);
  for (Rig* rig : {&all, &some}) rig->forward(0);
  Rig::Work of_all = all.work_of_backward(0), of_some = some.work_of_backward(0);
  EXPECT_LT(of_some.flops, of_all.flops / 2);
  EXPECT_EQ(of_some.ops["gemm"], p.gemms) << "of " << of_all.ops["gemm"];
  const Rig::Results want = all.results();
  for (const auto& [name, bytes] : some.results()) EXPECT_TRUE(want.at(name) == bytes) << name;
}

// Products of the backward pass of layer 1, without the fused one of the down projection's dx:
//   attention   dx of gate and up; dx of o; dw of o, of q, k and v
//   mlp         dx and dw of gate and up; dw of down
//   latent      dx of the shared expert's gate and up, and of its gate; both of o, kv_b and q_b; dw of kv_a (2) and q_a
INSTANTIATE_TEST_SUITE_P(
    Models, LowestTrained,
    testing::Values(
        Lowest{"Attention", dense_model(), {"*embed_tokens*", "model.layers.0.*", "*norm*", "*.mlp.*"}, 4},
        Lowest{"Mlp", dense_model(), {"*embed_tokens*", "model.layers.0.*", "*norm*", "*.self_attn.*"}, 3},
        Lowest{"Latent", latent_model(3), {"*embed_tokens*", "model.layers.0.*", "*layernorm.weight", "*.mlp.*"}, 11}),
    [](const auto& info) { return info.param.name; });

const std::vector<std::string> kSomeFrozen = {"*experts*", "*o_proj*", "*.mlp.down_proj*"},
                               kLowestFrozen = {"*embed_tokens*", "model.layers.0.*", "*layernorm*"};
constexpr RecomputeSpec kAll{.layer = true}, kSome{.norm = true, .attention = true, .expert_up = true};
INSTANTIATE_TEST_SUITE_P(Models, BackwardPasses,
                         testing::Values(Case{"Dense", dense_model()}, Case{"DenseRecomputed", dense_model(), kAll},
                                         Case{"Moe", moe_model()}, Case{"MoeBf16", moe_model(), {}, DType::bf16},
                                         Case{"MoeRecomputed", moe_model(), kAll},
                                         Case{"MoePartlyRecomputed", moe_model(), kSome},
                                         Case{"MoeFrozen", moe_model(), {}, DType::f32, kSomeFrozen},
                                         Case{"MoeLowestFrozen", moe_model(), {}, DType::f32, kLowestFrozen},
                                         Case{"GptOss", gpt_oss_model()}, Case{"Latent", latent_model(0)},
                                         Case{"LatentQuery", latent_model(3)},
                                         Case{"LatentRecomputed", latent_model(3), kAll}, Case{"Mtp", mtp_model()},
                                         Case{"MtpRecomputed", mtp_model(), kAll},
                                         Case{"MoeInChunks", moe_model(), kAll, DType::bf16, {}, 2},
                                         Case{"LatentInChunks", latent_model(3), kAll, DType::bf16, {}, 2}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moebius

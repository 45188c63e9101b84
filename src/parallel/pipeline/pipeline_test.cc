// A model cut into stages computes the bits of the model on one rank: every gradient, loss and router sum, whatever the
// number of ranks, virtual stages and micro-batches, where the stages are cut and whether sends overlap.
#include "parallel/pipeline/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include "comm/transport/threads.h"
#include "core/rng.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/testing.h"
#include "parallel/sharding/tied_embedding.h"

namespace moebius {
namespace {

using testing::HasSubstr;

struct Case {
  const char* name;
  int64_t num_ranks = 1;
  int64_t layers = 4;
  PipelineSpec pipeline;
  DType dtype = DType::f32;
  bool tied = false;
  RecomputeSpec recompute = {};
  bool dense = false;           // no MoE layers
  int64_t delayed_weights = 0;  // weight passes that wait (parallel/pipeline/testing.h)
  OffloadSpec offload = {};
};

constexpr BatchShape kShape{.batch = 2, .seq = 5, .max_segments = 2};
const BalanceSpec kBalance{
    .aux = true, .seq_aux = true, .global_aux = true, .aux_coeff = 0.05, .z_coeff = 0.01, .jitter = 0.1};

ModelSpec tiny_model(int64_t layers, bool tied = false, bool dense = false) {
  ModelSpec m;
  m.vocab_size = 23;
  m.hidden_size = 12;
  m.num_layers = layers;
  m.num_heads = 2;
  m.num_kv_heads = 1;
  m.head_dim = 6;
  m.intermediate_size = 10;
  m.max_position_embeddings = 8;
  m.initializer_range = 0.3;
  for (int64_t i = 0; i < layers; ++i) m.moe_layers.push_back(!dense && i % 3 != 0);
  m.num_experts = 3;
  m.top_k = 2;
  m.moe_intermediate_size = 7;
  m.shared_intermediate_size = 5;
  m.tie_word_embeddings = tied;
  m.check();
  return m;
}

// Micro-batch m of M, a function of m alone.
void fill(MicroBatch& b, int64_t vocab, int64_t m, int64_t M) {
  const Rng rng(3, RngSite::bench, static_cast<uint64_t>(m));
  for (int64_t t = 0; t < kShape.tokens(); ++t) {
    b.token_T.ptr<int32_t>()[t] = static_cast<int32_t>(rng.below(2 * t, vocab));
    b.target_T.ptr<int32_t>()[t] = static_cast<int32_t>(rng.below(2 * t + 1, vocab));
    b.weight_T.ptr<float>()[t] = t % 4 == 1 ? 0.0f : 1.0f;
    b.pos_T.ptr<int32_t>()[t] = static_cast<int32_t>(t % kShape.seq);
    b.doc_start_T.ptr<int32_t>()[t] = 0;
    b.segment_T.ptr<int32_t>()[t] = static_cast<int32_t>(t / kShape.seq);
  }
  b.scalars.set_loss_scale(0, 1.0 / static_cast<double>(M * kShape.tokens()));
  b.scalars.total_tokens = static_cast<double>(M * kShape.tokens());
  b.scalars.set_step(1);
  b.scalars.set_first_token(m * kShape.tokens());
  b.store_scalars();
  b.training = true;
}

// The bytes of tensors by name: the merged results of all ranks.
using Results = std::map<std::string, std::vector<std::byte>>;
void add(Results& results, const std::string& name, const Tensor& t) {
  const auto* bytes = static_cast<const std::byte*>(t.data);
  ASSERT_TRUE(results.emplace(name, std::vector<std::byte>(bytes, bytes + t.num_bytes())).second) << name;
}

struct RankOptions {
  DType dtype = DType::f32;
  RecomputeSpec recompute = {};
  OffloadSpec offload = {};
  int64_t delayed_weights = 0;  // as in Case
  bool one_stage = false;       // on one rank: the pipeline of one stage
};

// The micro-batches of a step, a model and its memory: what an engine would hold on one rank. On one rank the model's
// passes are called one by one, unless one_stage selects the pipeline of one stage.
class TestRank {
 public:
  TestRank(const ModelSpec& spec, const PipelineSpec& pipeline, Mesh mesh, const RankOptions& o = {})
      : mesh_(std::move(mesh)),
        plan_(o.recompute, o.offload),
        batches_(static_cast<size_t>(pipeline.num_micro_batches)) {
    for (MicroBatch& batch : batches_) declare_micro_batch(plan_, kShape, batch);
    const bool cut = mesh_.shape().pp > 1 || o.delayed_weights > 0 || o.one_stage;
    if (cut) rank_ = pipeline_rank(pipeline, spec, mesh_.shape().pp, mesh_.place().pp);
    if (o.delayed_weights > 0) delay_weights(pipeline, o.delayed_weights);
    const PrecisionSpec precision{.compute = o.dtype};
    model_.emplace(ModelContext{.model = spec,
                                .balance = kBalance,
                                .precision = precision,
                                .mesh = mesh_,
                                .plan = plan_,
                                .use = ModelUse::training,
                                .shape = kShape,
                                .max_positions = 8,
                                .seed = 7,
                                .stages = cut ? rank_->stages() : whole_model(spec)});
    if (cut) pipeline_.emplace(*rank_, *model_, mesh_, plan_);
    Stream null(DeviceKind::null, pool_, nullptr, DeviceKind::cpu);
    StepStack counts(DeviceKind::null, nullptr, 0);
    cut ? pipeline_->run_one_micro_batch(null, counts, batches_[0]) : run_whole(null, counts, batches_[0]);
    if (rank_) tied_.emplace(*model_, mesh_, rank_->layout);
    if (rank_) tied_->sum_gradients(null, counts);
    plan_.bind(DeviceKind::cpu, counts.high_water());
    model_->prepare_offload(s_);
    for (size_t m = 0; m < batches_.size(); ++m)
      fill(batches_[m], spec.vocab_size, static_cast<int64_t>(m), pipeline.num_micro_batches);
    model_->init_state(s_);
    model_->params().init(s_, 7);
  }

  void run_step() {
    if (pipeline_) return pipeline_->run_step(s_, plan_.stack(), batch_of());
    for (const MicroBatch& batch : batches_) run_whole(s_, plan_.stack(), batch);
  }
  void sum_tied_gradients() { tied_->sum_gradients(s_, plan_.stack()); }
  Pipeline& pipeline() { return *pipeline_; }
  Pipeline::BatchOf batch_of() const {
    return [this](int64_t m) -> const MicroBatch& { return batches_[static_cast<size_t>(m)]; };
  }
  Model& model() { return *model_; }
  const Mesh& mesh() const { return mesh_; }
  Stream& stream() { return s_; }
  StepStack& stack() { return plan_.stack(); }
  const MicroBatch& batch(int64_t m) const { return batches_[static_cast<size_t>(m)]; }

  void add_to(Results& results) const {
    for (const Param& p : model_->params().all()) {
      if (p.has_grad) add(results, p.spec.name + (p.spec.tied_copy ? " (copy)" : ""), p.dw);
    }
    for (const auto& layer : model_->moe_layers()) {
      const RouterMetrics m = layer.moe->router().metrics();
      const std::string prefix = fmt::format("layer {} ", layer.layer);
      add(results, prefix + "load", m.load_E);
      add(results, prefix + "aux", m.aux_1);
      add(results, prefix + "z", m.z_1);
      add(results, prefix + "entropy", m.entropy_1);
    }
    if (model_->stages().back().spec.loss) add(results, "loss", model_->loss_sum());
  }

  const PipelineRank& rank() const { return *rank_; }

 private:
  void delay_weights(const PipelineSpec& pipeline, int64_t count) {
    const Schedule schedule = with_delayed_weights(schedule_1f1b({.num_ranks = mesh_.shape().pp,
                                                                  .num_virtual = pipeline.num_virtual,
                                                                  .num_micro_batches = pipeline.num_micro_batches}),
                                                   count);
    simulate(schedule, equal_times(schedule.shape));
    rank_->step = place_actions(pipeline.overlap ? schedule : without_overlap(schedule), mesh_.place().pp);
  }
  void run_whole(Stream& s, StepStack& stack, const MicroBatch& batch) {
    Step step{s, stack, batch};
    const auto stream_TD = [&] {
      return stack.alloc({model_->stream_rows(), model_->spec().hidden_size}, model_->dtype());
    };
    {
      StackScope scope(stack);
      model_->forward(step, {}, stream_TD(), /*with_gradients=*/true);
    }
    model_->forward_loss(step, {}, /*with_gradients=*/true);
    StackScope scope(stack);
    model_->backward(step, {}, stream_TD());
  }

  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  Mesh mesh_;
  MemoryPlan plan_;
  std::deque<MicroBatch> batches_;
  std::optional<PipelineRank> rank_;
  std::optional<Model> model_;
  std::optional<Pipeline> pipeline_;
  std::optional<TiedEmbedding> tied_;
};

Results run_on_one_rank(const Case& c, bool one_stage = false) {
  PipelineSpec pipeline = c.pipeline;
  if (one_stage) pipeline = {.num_micro_batches = c.pipeline.num_micro_batches};
  TestRank one(tiny_model(c.layers, c.tied, c.dense), pipeline, Mesh(MeshShape{}),
               {.dtype = c.dtype, .one_stage = one_stage});
  one.run_step();
  Results results;
  one.add_to(results);
  return results;
}

Results run_on_ranks(const Case& c, const std::function<void(TestRank&)>& body) {
  Results results;
  std::mutex mutex;
  run_threads(static_cast<int>(c.num_ranks), {.timeout_s = 30}, [&](Transport& transport) {
    TestRank rank(tiny_model(c.layers, c.tied, c.dense), c.pipeline, Mesh(MeshShape{.pp = c.num_ranks}, transport),
                  {c.dtype, c.recompute, c.offload, c.delayed_weights});
    body(rank);
    const std::lock_guard lock(mutex);
    rank.add_to(results);
  });
  return results;
}

void expect_equal(const Results& got, const Results& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, bytes] : expected) EXPECT_TRUE(got.contains(name) && got.at(name) == bytes) << name;
}

class PipelineEquals : public testing::TestWithParam<Case> {};

TEST_P(PipelineEquals, OneRank) {
  const Results expected = run_on_one_rank(GetParam());
  ASSERT_GT(expected.size(), GetParam().dense ? 20u : 40u);
  for (const bool overlap : {true, false}) {
    Case c = GetParam();
    c.pipeline.overlap = overlap;
    expect_equal(run_on_ranks(c, [](TestRank& rank) { rank.run_step(); }), expected);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, PipelineEquals,
    testing::Values(
        Case{"TwoRanks", 2, 4, {.num_micro_batches = 3}}, Case{"OneMicroBatch", 2, 4, {.num_micro_batches = 1}},
        Case{"ThreeRanks", 3, 6, {.num_micro_batches = 5}}, Case{"FourRanks", 4, 4, {.num_micro_batches = 6}},
        Case{"FourRanksTwoMicroBatches", 4, 4, {.num_micro_batches = 2}},
        Case{"Virtual", 2, 4, {.num_virtual = 2, .num_micro_batches = 4}},
        Case{"VirtualOnThree", 3, 6, {.num_virtual = 2, .num_micro_batches = 3}},
        Case{"ThreeVirtual", 2, 6, {.num_virtual = 3, .num_micro_batches = 6}},
        Case{"Uneven", 3, 5, {.layout = "E t | t*3 | t L", .num_micro_batches = 4}},
        Case{"EndsAlone", 4, 4, {.layout = "E | t*3 | t | L", .num_micro_batches = 3}},
        Case{"UnevenVirtual", 2, 5, {.num_virtual = 2, .layout = "E t | t*2 | t*2 | L", .num_micro_batches = 2}},
        Case{"Recomputed", 2, 4, {.num_virtual = 2, .num_micro_batches = 4}, DType::bf16, false, {.layer = true}},
        Case{"TwoRanksBf16", 2, 4, {.num_micro_batches = 3}, DType::bf16},
        Case{"VirtualBf16", 2, 4, {.num_virtual = 2, .num_micro_batches = 4}, DType::bf16}),
    [](const auto& info) { return info.param.name; });

// Weight passes that run later, with other passes between: the same bits, of MoE and of dense models, on one rank and
// on several, whether tensors are kept or recomputed.
INSTANTIATE_TEST_SUITE_P(
    DelayedWeights, PipelineEquals,
    testing::Values(Case{.name = "Moe", .pipeline = {.num_micro_batches = 3}, .delayed_weights = 1},
                    Case{.name = "Dense", .pipeline = {.num_micro_batches = 3}, .dense = true, .delayed_weights = 2},
                    Case{
                        .name = "MoeOnTwo", .num_ranks = 2, .pipeline = {.num_micro_batches = 4}, .delayed_weights = 1},
                    Case{.name = "Virtual",
                         .num_ranks = 2,
                         .pipeline = {.num_virtual = 2, .num_micro_batches = 4},
                         .dtype = DType::bf16,
                         .delayed_weights = 3},
                    Case{.name = "Recomputed",
                         .num_ranks = 2,
                         .pipeline = {.num_micro_batches = 4},
                         .dtype = DType::bf16,
                         .recompute = {.layer = true},
                         .delayed_weights = 2}),
    [](const auto& info) { return info.param.name; });

PipelineSpec zb_h1(int64_t num_micro_batches) {
  return {.schedule = PipelineSchedule::zb_h1, .num_micro_batches = num_micro_batches};
}

INSTANTIATE_TEST_SUITE_P(ZbH1, PipelineEquals,
                         testing::Values(Case{"TwoRanks", 2, 4, zb_h1(3)}, Case{"OneMicroBatch", 3, 6, zb_h1(1)},
                                         Case{"FourRanks", 4, 4, zb_h1(6)}, Case{"FewMicroBatches", 4, 4, zb_h1(2)},
                                         Case{"Recomputed", 3, 6, zb_h1(5), DType::bf16, false, {.norm = true}}),
                         [](const auto& info) { return info.param.name; });

// Tensors that layers keep are on the host, whatever micro-batches are in flight and whichever pass comes next.
const OffloadSpec kAllOnHost{.tensors = {.layer = true}}, kHalfOnHost{.tensors = {.layer = true}, .fraction = 0.5};

INSTANTIATE_TEST_SUITE_P(
    OnTheHost, PipelineEquals,
    testing::Values(
        Case{.name = "OneStage", .pipeline = {.num_micro_batches = 3}, .offload = kAllOnHost},
        Case{.name = "TwoRanks",
             .num_ranks = 2,
             .layers = 6,
             .pipeline = {.num_micro_batches = 4},
             .offload = kAllOnHost},
        Case{.name = "FourRanks",
             .num_ranks = 4,
             .layers = 8,
             .pipeline = {.num_micro_batches = 6},
             .offload = kAllOnHost},
        Case{.name = "Half", .num_ranks = 2, .layers = 8, .pipeline = {.num_micro_batches = 5}, .offload = kHalfOnHost},
        Case{.name = "Virtual",
             .num_ranks = 2,
             .layers = 6,
             .pipeline = {.num_virtual = 3, .num_micro_batches = 6},
             .offload = kAllOnHost},
        Case{.name = "VirtualUneven",
             .num_ranks = 2,
             .layers = 5,
             .pipeline = {.num_virtual = 2, .layout = "E t | t*2 | t*2 | L", .num_micro_batches = 4},
             .dtype = DType::bf16,
             .offload = kAllOnHost},
        Case{.name = "Recomputed",
             .num_ranks = 2,
             .layers = 6,
             .pipeline = {.num_virtual = 1, .num_micro_batches = 4},
             .recompute = {.layer = true},
             .offload = {.layer_input = true}},
        Case{.name = "ZbH1",
             .num_ranks = 3,
             .layers = 6,
             .pipeline = zb_h1(4),
             .dtype = DType::bf16,
             .offload = kHalfOnHost},
        Case{.name = "DelayedWeightsVirtual",
             .num_ranks = 2,
             .layers = 8,
             .pipeline = {.num_virtual = 2, .num_micro_batches = 4},
             .dtype = DType::bf16,
             .delayed_weights = 3,
             .offload = kAllOnHost}),
    [](const auto& info) { return info.param.name; });

// The plan keeps the inputs of weight passes, and holds a set of saved tensors for each delayed pass.
TEST(Pipeline, DelayedWeightsAreHeldByThePlan) {
  const Case c{.name = "", .pipeline = {.num_micro_batches = 4}, .delayed_weights = 2};
  run_on_ranks(c, [](TestRank& rank) {
    const HeldStage held = rank.rank().stages().at(0);
    EXPECT_TRUE(held.splits_backward);
    EXPECT_EQ(held.num_saved, 3);
    rank.run_step();
  });
}

// The obvious order, one micro-batch after another. A forward pass by itself computes the loss and no gradients.
TEST(Pipeline, OneMicroBatchAtATimeEqualsOneRank) {
  const Case c{"", 2, 4, {.num_virtual = 2, .num_micro_batches = 2}};
  const Results expected = run_on_one_rank(c);
  expect_equal(run_on_ranks(c,
                            [](TestRank& rank) {
                              for (int64_t m = 0; m < 2; ++m)
                                rank.pipeline().run_one_micro_batch(rank.stream(), rank.stack(), rank.batch(m));
                            }),
               expected);
  const Results forward = run_on_ranks(c, [](TestRank& rank) {
    for (int64_t m = 0; m < 2; ++m) rank.pipeline().run_forward(rank.stream(), rank.stack(), rank.batch(m));
  });
  EXPECT_EQ(forward.at("loss"), expected.at("loss"));
  EXPECT_EQ(forward.at("layer 2 load"), expected.at("layer 2 load"));
  EXPECT_EQ(forward.at("model.norm.weight"), std::vector<std::byte>(expected.at("model.norm.weight").size()));
}

// On one rank the list is a forward and a backward of each micro-batch, and the stream is scratch.
TEST(Pipeline, OneStageIsTheModel) {
  for (const bool tied : {false, true}) {
    const Case c{"", 1, 4, {.num_micro_batches = 3}, DType::bf16, tied};
    expect_equal(run_on_one_rank(c, /*one_stage=*/true), run_on_one_rank(c));
  }
  TestRank rank(tiny_model(4), {.num_micro_batches = 3}, Mesh(MeshShape{}), {.one_stage = true});
  const RankProgram& step = rank.pipeline().rank().step;
  EXPECT_EQ(step.actions.size(), 6u) << "forward and backward of three micro-batches";
  EXPECT_EQ(step.num_saved_sets, std::vector<int64_t>{1});
}

// Each border carries each micro-batch once in each direction, one [T, D] tensor.
TEST(Pipeline, SendsOneTensorPerStageBoundary) {
  const Case c{"", 3, 6, {.num_virtual = 2, .num_micro_batches = 3}, DType::bf16};
  run_on_ranks(c, [](TestRank& rank) {
    rank.run_step();
    const int64_t message = kShape.tokens() * rank.model().spec().hidden_size * 2;
    const Mesh& mesh = rank.mesh();
    const int64_t p = mesh.place().pp;
    EXPECT_EQ(mesh.group(Axis::pp).sent_bytes(), 3 * message * (p == 2 ? 1 : 2));
    EXPECT_EQ(mesh.group(Axis::pp_back).sent_bytes(), 3 * message * (p == 0 ? 1 : 2));
  });
}

std::vector<float> floats(const std::vector<std::byte>& bytes) {
  const auto* x = reinterpret_cast<const float*>(bytes.data());
  return {x, x + bytes.size() / sizeof(float)};
}

// Embedding and head add to one gradient. On one rank their shares alternate, micro-batch by micro-batch, on two
// each is summed first: another order of 2 M values, so the bound is 2 M roundings of the largest.
TEST(Pipeline, TiedEmbeddingsAreOneTensor) {
  const Case c{"", 3, 6, {.num_virtual = 2, .num_micro_batches = 3}, DType::f32, /*tied=*/true};
  const Results expected = run_on_one_rank(c);
  Results got = run_on_ranks(c, [](TestRank& rank) {
    rank.run_step();
    rank.sum_tied_gradients();
  });
  const std::string name = "model.embed_tokens.weight";
  EXPECT_EQ(got.at(name), got.at(name + " (copy)"));
  const std::vector<float> sum = floats(got.at(name)), exact = floats(expected.at(name));
  float largest = 0;
  for (const float x : exact) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(sum[i], exact[i], 6 * 0x1p-23f * largest);
  got.erase(name + " (copy)");
  got[name] = expected.at(name);
  expect_equal(got, expected);
}

TEST(Pipeline, HoldsTheSimulatedNumberOfSavedSets) {
  const ModelSpec model = tiny_model(4);
  const PipelineSpec spec{.num_virtual = 2, .num_micro_batches = 8};
  const SimulatedSchedule r = simulate(schedule_1f1b({.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 8}),
                                       equal_times({.num_ranks = 2, .num_virtual = 2, .num_micro_batches = 8}));
  for (int64_t p = 0; p < 2; ++p) {
    const PipelineRank rank = pipeline_rank(spec, model, 2, p);
    ASSERT_EQ(rank.stages().size(), 2u);
    for (size_t v = 0; v < 2; ++v) EXPECT_EQ(rank.stages()[v].num_saved, r.ranks[p].peak_of_stage[v]);
    EXPECT_EQ(rank.stages()[0].spec.first_layer, p);
    EXPECT_EQ(rank.stages()[1].spec.first_layer, 2 + p);
  }
}

// The error names the rank, its coordinates in the mesh, and the action that failed. The other
// ranks end with it.
TEST(Pipeline, ARankThatThrowsEndsAll) {
  const ModelSpec model = tiny_model(4);
  WorldOptions options{.timeout_s = 30};
  options.coordinates = [](int rank) { return to_string(place_of({.pp = 2}, rank)); };
  try {
    run_threads(2, options, [&](Transport& transport) {
      TestRank rank(model, {.num_micro_batches = 3}, Mesh(MeshShape{.pp = 2}, transport));
      const bool fails = transport.rank() == 1;
      rank.pipeline().run_step(rank.stream(), rank.stack(), [&](int64_t m) -> const MicroBatch& {
        MOEBIUS_CHECK(input, !fails || m < 2, "no such batch");
        return rank.batch(m);
      });
    });
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::input);
    EXPECT_STREQ(e.what(),
                 "rank 1 (tp 0, cp 0, dp 0, pp 1, etp 0, ep 0, edp 0): "
                 "pipeline, forward of micro-batch 2, stage 1: no such batch");
  }
}

TEST(Pipeline, RefusesWithTheEquation) {
  const auto error = [](const PipelineSpec& spec, int64_t num_ranks) -> std::string {
    try {
      pipeline_rank(spec, tiny_model(4), num_ranks, 0);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      return e.what();
    }
    return "none";
  };
  EXPECT_THAT(error({}, 3), HasSubstr("divisible by pp * vpp = 3 * 1 = 3; got 4 layers; set parallel.layout"));
  EXPECT_THAT(error({.num_virtual = 2, .num_micro_batches = 3}, 2), HasSubstr("got 3 mod 2 = 1; change"));
  EXPECT_THAT(error({.layout = "E t | t*3"}, 2), HasSubstr("L is due"));
}

// The first stage continues with its second micro-batch while the next stage has not begun. With sends that are
// waited for the two wait for each other forever.
void run_first_stage_ahead(bool overlap) {
  std::atomic<bool> is_ahead = false;
  run_threads(2, {.timeout_s = overlap ? 30.0 : 0.5}, [&](Transport& transport) {
    TestRank rank(tiny_model(4), {.num_micro_batches = 3, .overlap = overlap}, Mesh(MeshShape{.pp = 2}, transport));
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(overlap ? 20 : 1);
    while (transport.rank() == 1 && !is_ahead && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_TRUE(transport.rank() == 0 || !overlap || is_ahead);
    rank.pipeline().run_step(rank.stream(), rank.stack(), [&](int64_t m) -> const MicroBatch& {
      if (m == 1) is_ahead = true;
      return rank.batch(m);
    });
  });
}

TEST(PipelineOverlap, SendsOverlapCompute) {
  EXPECT_NO_THROW(run_first_stage_ahead(/*overlap=*/true));
  try {
    run_first_stage_ahead(/*overlap=*/false);
    FAIL() << "without overlap a send is waited for";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::distributed);
    EXPECT_THAT(e.what(), HasSubstr("did not join: rank 1"));
  }
}

}  // namespace
}  // namespace moebius

// Steps with dynamic cp have the loss of one rank, and of every document alone; and a resumed step is the same step.
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "device/accelerator.h"
#include "engine/engine.h"
#include "io/testing.h"
#include "tests/distributed/ranks.h"
#include "train/loader.h"
#include "train/metrics.h"

namespace moebius {
namespace {

constexpr int64_t kSeq = 16, kVocab = 11, kSteps = 3, kPipelineSteps = 12;

// Documents of 1 to 16 tokens, of which most are short.
std::string write_documents(const TestDir& dir) {
  TokenDatasetWriter writer(dir.path("documents"), TokenType::u16);
  const Rng rng(7, RngSite::bench);
  for (int64_t i = 0, n = 0; i < 60; ++i) {
    const int64_t length =
        i % 6 == 0 ? 11 + static_cast<int64_t>(rng.below(n, 6)) : 1 + static_cast<int64_t>(rng.below(n, 4));
    for (int64_t t = 0; t < length; ++t, ++n) {
      const auto id = static_cast<int32_t>(rng.below(n + 1000, kVocab));
      writer.add_tokens({&id, 1});
    }
    writer.end_document();
  }
  writer.close();
  return dir.path("documents");
}

RunSpec run_of(const std::string& prefix, const ParallelSpec& parallel) {
  RunSpec run;
  run.model = model_spec_from_hf({{"model_type", "mixtral"},
                                  {"vocab_size", kVocab},
                                  {"hidden_size", 8},
                                  {"intermediate_size", 5},
                                  {"num_hidden_layers", 2},
                                  {"num_attention_heads", 8},
                                  {"num_key_value_heads", 4},
                                  {"head_dim", 2},
                                  {"num_local_experts", 4},
                                  {"num_experts_per_tok", 2},
                                  {"initializer_range", 0.5},
                                  {"max_position_embeddings", kSeq}},
                                 "test");
  run.precision.compute = DType::f32;
  run.moe.aux = run.moe.seq_aux = true;
  run.moe.aux_coeff = 0.01;
  run.moe.jitter = 0;
  run.optimizer.kind = OptimizerKind::sgd;  // an update is as exact as its gradient
  run.data.separate_documents = run.data.pack_documents = run.data.order_by_cost = true;
  run.data.train = {{prefix, 1}};
  run.train.seq_len = kSeq;
  run.train.micro_batch = 1;
  run.train.global_batch = 8;
  run.parallel = parallel;
  run.threads = 1;
  return run;
}

// A loader, and the cp of each micro-batch that it filled, in order.
class Watched : public BatchSource {
 public:
  Watched(const RunSpec& run, const DataShare& share) : loader_(run.data.train, run, true, share) {}
  void begin_step(int64_t step) override { loader_.begin_step(step); }
  void fill(MicroBatch& batch, int64_t m) override {
    loader_.fill(batch, m);
    cps.push_back(batch.cp);
  }
  std::vector<int64_t> cps;

 private:
  Loader loader_;
};

struct Trained {
  std::vector<double> losses, aux_losses;
  std::vector<int64_t> cps;  // of each micro-batch
  int64_t cp_bytes = 0;
  std::string links;  // Engine::links_text
};

Trained train(Transport& world, const RunSpec& run, int64_t steps) {
  const MeshShape mesh = mesh_shape(run.parallel, world.size());
  EngineSpec spec = training_engine_spec(run, mesh);
  if (world.size() > 1) spec.world = &world;
  Engine engine(spec);
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
  const RankPlace at = engine.mesh().place();
  Watched source(run, {.dp_rank = at.dp, .dp = mesh.dp, .cp_rank = at.cp, .cp = mesh.cp});
  Trained trained;
  for (int64_t step = 1; step <= steps; ++step) {
    engine.step(source, step, 0.1);
    const StepReport report = read_step(engine, 1);
    engine.end_of_step();
    trained.losses.push_back(report.loss);
    trained.aux_losses.push_back(report.aux_loss);
  }
  trained.cps = source.cps;
  trained.cp_bytes = engine.mesh().sent_bytes(Axis::cp);
  trained.links = engine.links_text();
  return trained;
}

Trained train_on(int ranks, const RunSpec& run, int64_t steps = kSteps) {
  Trained trained;
  run_threads(ranks, test_world(), [&](Transport& world) {
    Trained mine = train(world, run, steps);
    if (world.rank() == 0) trained = std::move(mine);
  });
  return trained;
}

// Sums of some 100 f32 products in another order, through 2 layers, 3 steps and the losses of some 100 tokens. The
// worst seen is 3e-7.
constexpr double kTolerance = 128 * 0x1p-23;

// In bf16, of losses of 1 to 3.
constexpr double kBf16Tolerance = 0x1p-5;

void expect_same(const Trained& got, const Trained& want, double tolerance = kTolerance) {
  for (size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], tolerance) << "step " << step;
    EXPECT_NEAR(got.aux_losses[step], want.aux_losses[step], tolerance) << "step " << step;
  }
}

// Returns the number of passes of the graph that has most: those with one cp that are neither the first nor the last
// of a step.
int64_t max_passes_of_a_graph(const Trained& trained) {
  std::map<int64_t, int64_t> passes;
  const int64_t of_step = std::ssize(trained.cps) / kSteps;
  for (int64_t i = 0; i < std::ssize(trained.cps); ++i) {
    if (i % of_step != 0 && i % of_step != of_step - 1) ++passes[trained.cps[i]];
  }
  int64_t most = 0;
  for (const auto& [cp, count] : passes) most = std::max(most, count);
  return most;
}

// Returns how many steps have the sequence of cp that most steps have, of those with several values of cp.
int64_t max_steps_of_a_sequence(const Trained& trained, int64_t steps) {
  std::map<std::vector<int64_t>, int64_t> counts;
  const int64_t of_step = std::ssize(trained.cps) / steps;
  int64_t most = 0;
  for (auto at = trained.cps.begin(); at != trained.cps.end(); at += of_step) {
    const std::vector<int64_t> sequence(at, at + of_step);
    if (sequence.front() != sequence.back()) most = std::max(most, ++counts[sequence]);
  }
  return most;
}

std::set<int64_t> distinct(const std::vector<int64_t>& cps) { return {cps.begin(), cps.end()}; }

const ParallelSpec kGpuLayouts[] = {
    {.cp = 4, .cp_comm = CpComm::allgather},
    {.cp = 4, .cp_comm = CpComm::ring},
    {.cp = 2, .ep = 4, .cp_comm = CpComm::alltoall, .dispatcher = DispatcherKind::direct}};

class DynamicCp : public ::testing::Test {
 protected:
  RunSpec run(const ParallelSpec& parallel) const { return run_of(prefix_, parallel); }
  // In bf16, with widths in multiples of 8.
  RunSpec wide_run(const ParallelSpec& parallel) const {
    RunSpec wide = run(parallel);
    wide.precision.compute = DType::bf16;
    wide.model.vocab_size = 16;
    wide.model.hidden_size = wide.model.moe_intermediate_size = 64;
    wide.model.head_dim = 16;
    wide.model.initializer_range = 0.1;
    return wide;
  }
  static void expect_captured_and_eager(RunSpec on_gpus, const Trained& one, double tolerance) {
    SCOPED_TRACE(static_cast<int>(on_gpus.parallel.cp_comm));
    on_gpus.parallel.dynamic_cp = true;
    on_gpus.device = DeviceKind::cuda;
    std::vector<double> eager;
    for (const bool graph : {false, true}) {
      on_gpus.graph = graph;
      const Trained got = train_on(4, on_gpus);
      expect_same(got, one, tolerance);
      if (!graph) eager = got.losses;
      EXPECT_EQ(got.losses, eager);
      const bool captures = graph && Accelerator::count() >= 4;
      EXPECT_THAT(got.links, ::testing::EndsWith(captures ? "steps are CUDA graphs" : "steps are eager"));
      if (captures) {
        EXPECT_GT(max_passes_of_a_graph(got), 2) << "the first two are eager";
      }
    }
  }
  TestDir dir_;
  std::string prefix_ = write_documents(dir_);
};

TEST_F(DynamicCp, HasTheLossesOfOneRank) {
  const Trained one = train_on(1, run({}));
  for (const CpComm comm : {CpComm::allgather, CpComm::ring, CpComm::alltoall}) {
    SCOPED_TRACE(static_cast<int>(comm));
    const Trained fixed = train_on(4, run({.cp = 4, .cp_comm = comm}));
    const Trained dynamic = train_on(4, run({.cp = 4, .cp_comm = comm, .dynamic_cp = true}));
    expect_same(fixed, one);
    expect_same(dynamic, one);
    EXPECT_EQ(distinct(dynamic.cps), (std::set<int64_t>{1, 2, 4}));
    EXPECT_EQ(distinct(fixed.cps), std::set<int64_t>{0});
    EXPECT_LT(dynamic.cp_bytes, fixed.cp_bytes);
  }
}

TEST_F(DynamicCp, WorksWithEveryOtherAxis) {
  const Trained one = train_on(1, run({}));
  expect_same(train_on(4, run({.cp = 2, .ep = 4, .dynamic_cp = true})), one);
  expect_same(train_on(4, run({.tp = 2, .cp = 2, .cp_comm = CpComm::ring, .dynamic_cp = true})), one);
  expect_same(train_on(4, run({.cp = 2, .pp = 2, .dynamic_cp = true})), one);
}

// They exchange tokens of experts and gradients in the same passes, which a GPU captures for each number.
TEST_F(DynamicCp, DpRanksUseTheSameDegreeInAMicroBatch) {
  const RunSpec spec = run({.cp = 2, .dynamic_cp = true});
  std::vector<std::vector<int64_t>> cps(4);
  run_threads(4, test_world(), [&](Transport& world) { cps[world.rank()] = train(world, spec, kSteps).cps; });
  EXPECT_EQ(distinct(cps[0]), (std::set<int64_t>{1, 2}));
  for (const std::vector<int64_t>& other : cps) EXPECT_EQ(other, cps[0]);
}

// Ranks may share a GPU. Where each has one, the passes for each number are captured when they run for the third time.
TEST_F(DynamicCp, OnGpusHasTheLossesOfOneRank) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const Trained one = train_on(1, run({}));
  for (const ParallelSpec& parallel : kGpuLayouts) expect_captured_and_eager(run(parallel), one, kTolerance);
}

// A graph of a pipeline has all micro-batches of a step, so each sequence of their cp has its own.
TEST_F(DynamicCp, OnGpusAPipelineHasTheBitsOfEagerSteps) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const Trained one = train_on(1, run({}));
  RunSpec on_gpus = run({.cp = 2, .pp = 2, .cp_comm = CpComm::ring, .dynamic_cp = true});
  on_gpus.device = DeviceKind::cuda;
  on_gpus.graph = false;
  const Trained eager = train_on(4, on_gpus, kPipelineSteps);
  expect_same(eager, one);
  if (Accelerator::count() < 4)
    GTEST_SKIP() << "ranks that share a GPU capture nothing, so only eager steps were compared";
  on_gpus.graph = true;
  const Trained captured = train_on(4, on_gpus, kPipelineSteps);
  EXPECT_EQ(captured.losses, eager.losses);
  EXPECT_THAT(captured.links, ::testing::EndsWith("steps are CUDA graphs"));
}

// Otherwise the test above captures nothing.
TEST_F(DynamicCp, SequencesOfCpRepeatOftenEnoughToBeCaptured) {
  const RunSpec pipeline = run({.cp = 2, .pp = 2, .cp_comm = CpComm::ring, .dynamic_cp = true});
  EXPECT_GT(max_steps_of_a_sequence(train_on(4, pipeline, kPipelineSteps), kPipelineSteps), 3) << "two are eager";
}

// In bf16, with widths that tensor cores take. A logit of this model is about 1, of which bf16 keeps 2^-9.
TEST_F(DynamicCp, OnGpusPortableKernelsHaveTheLossesOfOneRank) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const auto portable = [&](const ParallelSpec& parallel) {
    RunSpec wide = wide_run(parallel);
    wide.device = DeviceKind::cuda;
    wide.kernels = KernelChoice::portable;
    return wide;
  };
  const Trained one = train_on(1, portable({}));
  for (const ParallelSpec& parallel : kGpuLayouts) expect_captured_and_eager(portable(parallel), one, kBf16Tolerance);
}

// The bound of the test above, where there is no GPU too.
TEST_F(DynamicCp, InBf16HasTheLossesOfOneRank) {
  const Trained one = train_on(1, wide_run({}));
  RunSpec dynamic = wide_run({.cp = 4, .cp_comm = CpComm::ring});
  dynamic.parallel.dynamic_cp = true;
  expect_same(train_on(4, dynamic), one, kBf16Tolerance);
}

// Capacity looks at the tokens of a whole micro-batch in their order, and jitter is drawn by a token's place. So
// their losses depend on the order of documents, but not on the run.
TEST_F(DynamicCp, TwoRunsHaveTheSameBits) {
  RunSpec capacity = run({.cp = 4, .dynamic_cp = true});
  capacity.moe.capacity_factor = 0.9;
  capacity.moe.jitter = 0.1;
  const Trained first = train_on(4, capacity), second = train_on(4, capacity);
  EXPECT_EQ(first.losses, second.losses);
  EXPECT_TRUE(std::isfinite(first.losses.back()));
}

// Each document of a step is a sequence of its own. Its micro-batch has no other document.
class EachAlone : public BatchSource {
 public:
  EachAlone(const RunSpec& run, DatasetOrder& order) {
    std::vector<int32_t> tokens(kSeq + 1);
    for (int64_t i = 0; i < run.train.global_batch; ++i) {
      const Sample sample = order.sample(i);
      order.fill(sample, tokens.data());
      std::vector<int32_t> ends = order.document_starts(sample);
      ends.push_back(kSeq + 1);
      int32_t begin = 0;
      for (const int32_t end : ends) {
        if (end - begin > 1) documents_.emplace_back(tokens.begin() + begin, tokens.begin() + end);
        begin = end;
      }
    }
    for (const auto& document : documents_) num_targets_ += std::ssize(document) - 1;
  }
  int64_t size() const { return std::ssize(documents_); }
  void fill(MicroBatch& batch, int64_t m) override {
    const std::vector<int32_t>& document = documents_[m];
    for (int64_t i = 0; i < kSeq; ++i) {
      const bool there = i + 1 < std::ssize(document);
      batch.token_T.ptr<int32_t>()[i] = there ? document[i] : 0;
      batch.target_T.ptr<int32_t>()[i] = there ? document[i + 1] : 0;
      batch.weight_T.ptr<float>()[i] = there ? 1.0f : 0.0f;
      batch.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(i);
      batch.doc_start_T.ptr<int32_t>()[i] = 0;
      batch.segment_T.ptr<int32_t>()[i] = 0;
    }
    batch.scalars.set_loss_scale(0, 1.0 / static_cast<double>(num_targets_));
    batch.scalars.total_tokens = static_cast<double>(size() * kSeq);
    batch.training = true;
  }

 private:
  std::vector<std::vector<int32_t>> documents_;
  int64_t num_targets_ = 0;
};

TEST_F(DynamicCp, HasTheLossOfUnpackedDocuments) {
  RunSpec unpacked = run({});
  std::vector<WeightedDataset> datasets;
  datasets.push_back({TokenDataset::open(prefix_), 1});
  DatasetOrder order(std::move(datasets),
                     {.seq_len = kSeq, .vocab_size = kVocab, .seed = unpacked.seed, .pack_documents = true});
  EachAlone source(unpacked, order);
  unpacked.train.global_batch = source.size();
  Engine engine(training_engine_spec(unpacked, MeshShape{}));
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
  engine.step(source, 1, 0.1);
  const double alone = read_step(engine, 1).loss;
  EXPECT_NEAR(train_on(4, run({.cp = 4, .dynamic_cp = true})).losses[0], alone, kTolerance);
}

}  // namespace
}  // namespace moebius

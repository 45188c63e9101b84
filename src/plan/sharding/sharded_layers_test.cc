#include "plan/sharding/sharded_layers.h"

#include "plan/testing.h"
#include "plan/work_time.h"

namespace moebius {
namespace {

// Layers of one gather of `bytes` over 8 ranks of a machine without latency, which takes a second.
struct Case {
  explicit Case(int64_t num_layers, int64_t num_micro_batches, bool overlap, double forward = 2, double backward = 4)
      : gpu(machine("h200")), passes(static_cast<size_t>(num_layers), {.forward = forward, .backward = backward}) {
    gpu.inside_us = 0;
    spec.mesh = {.dp = 8, .edp = 8};
    spec.num_micro_batches = num_micro_batches;
    spec.overlap = overlap;
    const double bytes = gpu.inside_gb_s * 1e9 * gpu.of(PlanSystem::moebius)[static_cast<size_t>(Share::inside)] /
                         message_time_over_links(8);
    layers.resize(passes.size());
    for (LayerTraffic& layer : layers) layer.weights[Axis::dp_cp] = {.wire_bytes = bytes, .calls = 1};
  }
  void shard_gradients() {
    for (LayerTraffic& layer : layers) layer.gradients = layer.weights;
  }
  ShardedTime time(const std::vector<int64_t>& stages) const {
    return sharded_time({.machine = gpu, .assume = assume, .spec = spec}, layers, passes, stages);
  }
  PlanMachine gpu;
  Assumptions assume;
  EngineSpec spec;
  std::vector<LayerTraffic> layers;
  std::vector<LayerSeconds> passes;
};

// Sums of bf16 over more than 8 ranks are f32 between levels, but not NCCL's own.
TEST(GradientBytes, OfBf16AreThoseOfF32BetweenLevels) {
  EngineSpec spec;
  spec.mesh = {.dp = 16, .edp = 16};
  ParamBucket bucket{.axis = Axis::dp_cp, .numel = 1600};
  EXPECT_EQ(gradient_wire_bytes(spec, bucket), 4 * 1500);
  bucket.sums_apart = true;
  EXPECT_EQ(gradient_wire_bytes(spec, bucket), 2 * 1400 + 4 * 100);
  spec.sums = GpuSums::nccl;
  EXPECT_EQ(gradient_wire_bytes(spec, bucket), 2 * 1500);
  spec.sums = GpuSums::ranks;
  spec.mesh = {.tp = 4, .dp = 16, .edp = 64};  // a node has 2 ranks of a group
  EXPECT_EQ(gradient_wire_bytes(spec, bucket), 2 * 800 + 4 * 700);
}

// The buffers keep two layers at each turn: (2 L - 4) M + 2 gathers. Most of many micro-batches are not run.
TEST(ShardedLayers, GatherOnlyLayersThatAreNotBuffered) {
  for (const int64_t M : {1, 3, 1000}) {
    const LayerExchange e = Case(5, M, true).time({5}).weights;
    EXPECT_NEAR(e.all_s, 6.0 * static_cast<double>(M) + 2, 1e-9);
    EXPECT_NEAR(e.seconds[static_cast<size_t>(Axis::dp_cp)], e.all_s, 1e-9);
    EXPECT_NEAR(e.exposed_s, 2, 1e-9) << "the first layer waits for its weights, and for those of the second before";
  }
  // With one buffer each pass gathers all but the layer at its turn, and nothing is hidden.
  const LayerExchange shown = Case(5, 3, false).time({5}).weights;
  EXPECT_NEAR(shown.all_s, 6 * 4 + 1, 1e-9);
  EXPECT_EQ(shown.exposed_s, shown.all_s);
}

// With shards of fewer ranks the first gather of each layer in a step is over more ranks.
TEST(ShardedLayers, GatherFromAllRanksOnceAStep) {
  Case all(5, 3, true);
  for (LayerTraffic& layer : all.layers) {
    layer.first_weights = layer.weights;
    layer.first_weights.at(Axis::dp_cp).wire_bytes *= 2;
  }
  EXPECT_NEAR(all.time({5}).weights.all_s, 6 * 3 + 2 + 5, 1e-9);
}

TEST(ShardedLayers, GathersLongerThanALayerAreExposed) {
  // Forward: 2 seconds for the first two, then each of the three others arrives half a second late. Backward: no wait.
  EXPECT_NEAR(Case(5, 1, true, 0.5).time({5}).weights.exposed_s, 2 + 3 * 0.5, 1e-9);
}

TEST(ShardedLayers, GradientSumsOverlapWithTheNextLayer) {
  Case all(5, 3, true);
  all.shard_gradients();
  const LayerExchange e = all.time({5}).gradients;
  const double sum = e.all_s / 15;  // the time of one: its messages take a second, and the parts that arrive are added
  EXPECT_GT(sum, 1);
  EXPECT_LT(sum, 1.5);
  EXPECT_NEAR(e.exposed_s, sum, 1e-9) << "of the last layer of the step";
  all.spec.overlap = false;
  EXPECT_NEAR(all.time({5}).gradients.exposed_s, e.all_s, 1e-9);
}

// Passes that take no time wait for both kinds of exchange, and for neither longer than it takes.
TEST(ShardedLayers, WaitNoLongerThanTheExchangesTake) {
  for (const int64_t M : {4, 1000}) {
    Case all(3, M, true, 0, 0);
    all.shard_gradients();
    const ShardedTime time = all.time({3});
    EXPECT_LE(time.weights.exposed_s, time.weights.all_s + 1e-9);
    EXPECT_LE(time.gradients.exposed_s, time.gradients.all_s + 1e-9);
    EXPECT_NEAR(time.weights.exposed_s + time.gradients.exposed_s, time.weights.all_s + time.gradients.all_s, 1e-9);
  }
}

// Each stage waits for its first layer. A frozen layer below has no backward pass.
TEST(ShardedLayers, EachStageWaitsForItsFirstLayer) {
  EXPECT_GT(Case(6, 2, true).time({3, 3}).weights.exposed_s, Case(6, 2, true).time({6}).weights.exposed_s);
  Case frozen(5, 1, true);
  for (size_t i = 0; i < 3; ++i) frozen.passes[i].has_backward = false;
  EXPECT_NEAR(frozen.time({5}).weights.all_s, 5, 1e-9);
  EXPECT_EQ(Case(0, 2, true).time({0}).weights.all_s, 0);
}

}  // namespace
}  // namespace moebius

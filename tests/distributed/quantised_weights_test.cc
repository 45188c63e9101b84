// Quantised copies of weights follow weights that arrive from other ranks, also during the first passes
// of a step. Weights that are held quantised change no bit.
#include <fmt/format.h>

#include "engine/engine_testing.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "tests/equivalence/tiny.h"

namespace moebius {
namespace {

class QuantisedWeights : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, QuantisedWeights, ::testing::Values(1, 2), name_of_ranks);

constexpr int64_t kSteps = 3, kMicroBatches = 3, kSequences = 2;

struct Trained {
  std::vector<double> losses;
  std::vector<float> masters;  // of this rank
  int64_t sent_bytes = 0, state_bytes = 0;
  bool operator==(const Trained&) const = default;
};

// in_step: Engine::step(), which makes the copies; otherwise pass by pass, without them.
Trained train_on(Transport& world, bool overlap, bool in_step, PrecisionChoice weights = PrecisionChoice::compute,
                 int64_t ep = 1, bool fsdp = false, PrecisionRecipe recipe = PrecisionRecipe::fp8_block,
                 bool weight_copies = true) {
  EngineSpec spec = testing::tiny_engine(testing::tiny_model(), kSequences, DType::bf16, 1);
  spec.precision.recipe = recipe;
  spec.precision.weights = weights;
  spec.precision.weight_copies = weight_copies;
  spec.fsdp = fsdp;
  spec.num_micro_batches = kMicroBatches;
  spec.overlap = overlap;
  spec.mesh = {.dp = world.size(), .ep = ep, .edp = world.size() / ep};
  spec.world = &world;
  Engine engine(spec);
  testing::init_params(engine);
  Trained trained;
  for (int64_t step = 1; step <= kSteps; ++step) {
    for (int64_t m = 0; m < kMicroBatches; ++m) {
      const int64_t first = (m * world.size() + engine.data_share().dp_rank) * kSequences;
      testing::fill_random(engine.batch(m), spec.model, step, first, kMicroBatches * kSequences * world.size());
      if (!in_step) engine.forward_backward(m);
    }
    in_step ? engine.step(step, 1e-2) : EngineTestAccess::optimizer_step(engine, step, 1e-2);
    trained.losses.push_back(engine.loss());
    engine.end_of_step();
  }
  trained.sent_bytes = engine.mesh().group(Axis::dp_cp).sent_bytes();
  trained.state_bytes = engine.plan().bytes(Life::state);
  trained.masters = testing::all_elements(engine, false);
  return trained;
}

TEST_P(QuantisedWeights, AreThoseOfTheLastUpdate) {
  run([](Transport& world) {
    const Trained expected = train_on(world, false, false);
    EXPECT_NE(expected.losses[0], expected.losses[2]);
    EXPECT_EQ(train_on(world, false, true), expected);
    Trained overlapped = train_on(world, true, true);
    overlapped.sent_bytes = expected.sent_bytes;  // the last weights were not sent
    EXPECT_EQ(overlapped, expected);
  });
}

// Ranks own other parts of the masters, since weights of 8 bits are in buckets of their own.
TEST_P(QuantisedWeights, HeldInEightBitsChangeNoBit) {
  run([](Transport& world) {
    for (const int64_t ep : {1, world.size()}) {
      const Trained expected = train_on(world, false, true, PrecisionChoice::compute, ep);
      for (const bool overlap : {false, true}) {
        for (const bool in_step : {false, true}) {
          const Trained held = train_on(world, overlap, in_step, PrecisionChoice::recipe, ep);
          EXPECT_EQ(held.losses, expected.losses) << overlap << in_step << ep;
          if (world.size() == 1) {
            EXPECT_EQ(held.masters, expected.masters);
          } else if (!overlap) {
            EXPECT_LT(held.sent_bytes, expected.sent_bytes);
          }
        }
      }
    }
  });
}

TEST_P(QuantisedWeights, WithoutCopiesChangeNoBit) {
  run([](Transport& world) {
    using enum PrecisionRecipe;
    for (const PrecisionRecipe recipe : {fp8_block, fp8_tensor, mxfp8, nvfp4}) {
      for (const PrecisionChoice weights : {PrecisionChoice::compute, PrecisionChoice::recipe}) {
        if (weights == PrecisionChoice::recipe && recipe != fp8_block) continue;
        const Trained kept = train_on(world, false, true, weights, 1, false, recipe);
        for (const bool overlap : {false, true}) {
          const Trained made = train_on(world, overlap, true, weights, 1, false, recipe, /*weight_copies=*/false);
          EXPECT_EQ(made.losses, kept.losses) << name_of(recipe) << overlap;
          if (!overlap) {
            EXPECT_EQ(made.masters, kept.masters) << name_of(recipe);
          }
          EXPECT_LT(made.state_bytes, kept.state_bytes) << name_of(recipe);
        }
      }
    }
  });
}

// A pass gathers the weights of a layer, in the dtype of the computation or in 8 bits, and quantises what it reads.
TEST_P(QuantisedWeights, ShardedChangeNoBit) {
  run([](Transport& world) {
    using enum PrecisionRecipe;
    for (const PrecisionRecipe recipe : {fp8_block, fp8_tensor, mxfp8, nvfp4}) {
      const Trained expected = train_on(world, false, true, PrecisionChoice::compute, 1, false, recipe);
      for (const bool overlap : {false, true}) {
        EXPECT_EQ(train_on(world, overlap, true, PrecisionChoice::compute, 1, true, recipe).losses, expected.losses);
        if (recipe != fp8_block) continue;
        EXPECT_EQ(train_on(world, overlap, true, PrecisionChoice::recipe, 1, true).losses, expected.losses);
      }
    }
  });
}

// log.precision has on every layout the numbers of one rank.
struct CountedRun {
  const char* name;
  int ranks;
  ParallelSpec layout;
  PrecisionRecipe recipe;
  bool fsdp = false, latent = false;
  // Ranks add shares of a token's sums, which differ in their last bits from those of one rank.
  bool adds_shares() const {
    return layout.tp > 1 || layout.cp > 1 || layout.etp > 1 ||
           (layout.ep > 1 && layout.dispatcher != DispatcherKind::alltoall);
  }
};
void PrintTo(const CountedRun& c, std::ostream* out) { *out << c.name; }

constexpr auto kBlock = PrecisionRecipe::fp8_block, kTensor = PrecisionRecipe::fp8_tensor, kMx = PrecisionRecipe::mxfp8,
               kNv = PrecisionRecipe::nvfp4;
const CountedRun kRuns[] = {
    {"nvfp4_dp2", 2, {}, kNv},
    {"nvfp4_tp2_ep2", 2, {.tp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall}, kNv},
    {"nvfp4_cp2_ep2", 2, {.cp = 2, .ep = 2, .dispatcher = DispatcherKind::direct}, kNv},
    {"nvfp4_pp2", 2, {.pp = 2}, kNv},
    {"nvfp4_ep2_alltoall", 2, {.ep = 2, .dispatcher = DispatcherKind::alltoall}, kNv},
    {"nvfp4_ep2_direct", 2, {.ep = 2, .dispatcher = DispatcherKind::direct}, kNv},
    {"nvfp4_etp2", 2, {.etp = 2, .dispatcher = DispatcherKind::allgather}, kNv},
    {"nvfp4_latent_cp2_ep2", 2, {.cp = 2, .ep = 2, .dispatcher = DispatcherKind::alltoall}, kNv, false, true},
    {"mxfp8_tp2", 2, {.tp = 2}, kMx},
    {"mxfp8_ep2_alltoall", 2, {.ep = 2, .dispatcher = DispatcherKind::alltoall}, kMx},
    {"mxfp8_ep2_direct", 2, {.ep = 2, .dispatcher = DispatcherKind::direct}, kMx},
    {"fp8_tensor_tp2", 2, {.tp = 2}, kTensor},
    {"fp8_block_ep2_alltoall", 2, {.ep = 2, .dispatcher = DispatcherKind::alltoall}, kBlock},
    {"fp8_block_fsdp", 2, {}, kBlock, true},
};

StepReport counted_step(Transport& world, const CountedRun& c, const ParallelSpec& layout, bool fsdp) {
  const LayoutModel what{.latent_qkv = c.latent,
                         .seq = 64,
                         .sequences = 4,
                         .quantised = true,
                         .recipe = c.recipe,
                         .weight_gradients = WeightGradientPrecision::recipe};
  EngineSpec spec = layout_engine_spec(world, what, layout, {.fsdp = fsdp});
  spec.measures_precision = true;
  if (c.fsdp) spec.precision.weight_copies = false;  // weights that are quantised at each use are not counted
  Engine engine(spec);
  init_layout(engine, what);
  return layout_step(engine, what, 1);
}

class LogPrecisionOnLayouts : public ::testing::TestWithParam<CountedRun> {};

// The number of elements shows whether each counts once: weights that count on each rank change it by 20 to 32 %. A
// token whose experts change because of the last bits changes it too, by 7e-5 in measurements.
// With nvfp4 the layouts are those with the blocks of dW of one rank: experts are on all ranks of tp and cp. Where
// ranks add shares, some number of nvfp4 rounds the other way, and others follow in later layers and in backward. So
// shares and scales are only alike there. With the other recipes blocks of dW may have other tokens, which changed
// shares by up to 4e-5 in measurements.
TEST_P(LogPrecisionOnLayouts, HasTheSharesOfOneRank) {
  const CountedRun& c = GetParam();
  const std::unique_ptr<Transport> self = make_self_transport();
  const StepReport want = counted_step(*self, c, {}, false);
  ASSERT_GE(want.precision.size(), 4u);
  run_threads(c.ranks, test_world(), [&](Transport& world) {
    const StepReport got = counted_step(world, c, c.layout, c.fsdp);
    if (world.rank() != 0) return;
    ASSERT_EQ(got.precision.size(), want.precision.size());
    for (size_t i = 0; i < got.precision.size(); ++i) {
      const auto &a = got.precision[i], &b = want.precision[i];
      SCOPED_TRACE(fmt::format("layer {}", b.layer));
      EXPECT_EQ(a.layer, b.layer);
      EXPECT_NEAR(a.elements / b.elements, 1, 1e-3);
      const bool is_alike = c.recipe == kNv && c.adds_shares();
      const double bound = c.recipe == kNv ? 1e-5 : 1e-4;
      EXPECT_NEAR(a.saturated, b.saturated, is_alike ? 0.1 * b.saturated : bound);
      EXPECT_NEAR(a.zeroed, b.zeroed, is_alike ? 0.1 * b.zeroed : bound);
      if (c.recipe == kNv) {
        EXPECT_GT(b.saturated, 0.005);
        EXPECT_GT(b.zeroed, 0.05);
      }
      if (c.recipe != kNv && c.recipe != kTensor) continue;
      EXPECT_NEAR(a.scale_max / b.scale_max, 1, is_alike ? 0.2 : 1e-4);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Runs, LogPrecisionOnLayouts, ::testing::ValuesIn(kRuns),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moebius

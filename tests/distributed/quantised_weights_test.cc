// Quantised copies of weights follow weights that arrive from other ranks, also during the first passes
// of a step. Weights that are held quantised change no bit.
#include "engine/engine_testing.h"
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

}  // namespace
}  // namespace moebius

// An update of states in host memory that overlaps with the first passes of the next step: the bits of states on the
// device. On the CPU its pieces run when they are waited for, so each missing wait changes numbers.
#include <gtest/gtest.h>

#include <limits>

#include "checkpoint/store.h"
#include "comm/control.h"
#include "io/testing.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/equivalence/gpu_specs.h"
#include "train/state.h"

namespace moebius {
namespace {

using enum MasterFormat;

struct Formats {
  const char* name;
  OptimizerSpec optimizer;
};
const Formats kFormats[] = {
    {"f32", {}},
    {"remainder", {.state = StateFormat::bf16, .master = bf16_remainder}},
    {"codes", {.state = StateFormat::blocks_8bit, .master = bf16_stochastic, .grad = GradFormat::bf16}},
    {"sgd", {.kind = OptimizerKind::sgd}},
};

// Rows of some matrices are whole blocks of 8-bit codes.
EngineSpec spec_of(const OptimizerSpec& optimizer, const ModelSpec& model = tiny_model()) {
  EngineSpec spec = spec_on(DeviceKind::cpu, DType::bf16);
  spec.model = model;
  spec.model.hidden_size = 256;
  spec.shape.num_mtp = model.num_mtp_layers;
  spec.optimizer = optimizer;
  return spec;
}

EngineSpec overlapped(EngineSpec spec) {
  spec.optimizer->offload = true;
  spec.optimizer->offload_grad = spec.optimizer->grad == GradFormat::bf16;
  spec.overlaps_update = true;
  return spec;
}

CheckpointBytes state_of(Engine& engine, const TestDir& dir, const char* name) {
  const std::unique_ptr<Transport> self = make_self_transport();
  Control control(*self);
  engine.finish_update();
  save_checkpoint(engine, control, dir.path(name), 1);
  Stream s = engine.stream();
  engine.model().params().clear_masters(s);
  return contents_of(dir.path(name) + "/step-00000001");
}

// Losses of five steps, the second of which follows a complete update.
struct Trained {
  explicit Trained(const EngineSpec& spec) : engine(spec) {
    losses = train(initialised(engine), 1);
    engine.finish_update();
    for (const double loss : train(engine, 4, /*first_step=*/2)) losses.push_back(loss);
  }
  Engine engine;
  std::vector<double> losses;
};

void expect_same(const EngineSpec& spec) {
  const TestDir dir;
  Trained resident(spec), moved(overlapped(spec));
  EXPECT_GT(moved.engine.plan().bytes(Life::host), 0);
  EXPECT_EQ(moved.losses, resident.losses);
  EXPECT_TRUE(state_of(moved.engine, dir, "moved") == state_of(resident.engine, dir, "resident"));
}

TEST(OverlappedUpdate, ChangesNoBitOfAnyFormat) {
  for (const auto& [name, optimizer] : kFormats) {
    SCOPED_TRACE(name);
    expect_same(spec_of(optimizer));
  }
}

TEST(OverlappedUpdate, ChangesNoBitOfOtherModels) {
  EngineSpec tied = spec_of({});
  tied.model.tie_word_embeddings = true;
  EngineSpec recomputed = spec_of({.grad = GradFormat::bf16});
  recomputed.recompute.layer = true;
  EngineSpec quantised = spec_of({});
  quantised.precision.recipe = PrecisionRecipe::fp8_tensor;
  for (const EngineSpec& spec : {tied, recomputed, quantised, spec_of({}, mtp_model())}) expect_same(spec);
}

TEST(OverlappedUpdate, IsCompleteBeforeOtherPasses) {
  const EngineSpec spec = spec_of({});
  Trained resident(spec), moved(overlapped(spec));
  const auto loss = [&](Engine& engine) {
    fill(engine.batch(), spec, /*step=*/9, 0);
    engine.forward();
    return engine.loss();
  };
  EXPECT_EQ(loss(moved.engine), loss(resident.engine));
  EXPECT_EQ(masters(moved.engine), masters(resident.engine));
}

TEST(OverlappedUpdate, OfGradientsThatAreNotFiniteChangesNothing) {
  const TestDir dir;
  Engine engine(overlapped(spec_of({})));
  train(initialised(engine), 2);
  const CheckpointBytes before = state_of(engine, dir, "before");
  fill_step(engine, 3);
  engine.batch().scalars.set_loss_scale(0, std::numeric_limits<double>::infinity());
  engine.step(3, 1e-2);
  EXPECT_FALSE(std::isfinite(*engine.grad_norm().ptr<float>()));
  EXPECT_TRUE(state_of(engine, dir, "after") == before);
}

// A step knows the time of the update that ran in it: none in the first one.
TEST(OverlappedUpdate, IsTimedInTheNextStep) {
  Engine engine(overlapped(spec_of({})));
  train(initialised(engine), 1);
  EXPECT_EQ(engine.step_times().states_s, 0);
  train(engine, 1, 2);
  EXPECT_GT(engine.step_times().states_s, 0);
}

}  // namespace
}  // namespace moebius

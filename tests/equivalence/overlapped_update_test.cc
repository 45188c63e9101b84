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

EngineSpec with_buffer(EngineSpec spec, double bytes) {
  spec.optimizer->offload_buffer = bytes / (int64_t{1} << 30);
  return spec;
}

// Returns the bytes of masters and moments of a spec with states on the host.
double bytes_on_host(EngineSpec spec) {
  spec.optimizer->offload_grad = false;
  spec.device = DeviceKind::null;
  return static_cast<double>(Engine(spec).plan().bytes(Life::host));
}

// Without a buffer; with one for a few vectors, for half of the states, and for more than all of them.
std::vector<double> buffers(const EngineSpec& overlapped) {
  const double all = bytes_on_host(overlapped);
  return {0, 16 << 10, all / 2, 2 * all};
}

void expect_same(const EngineSpec& spec) {
  const TestDir dir;
  Trained resident(spec);
  const CheckpointBytes expected = state_of(resident.engine, dir, "resident");
  for (const double buffer : buffers(overlapped(spec))) {
    SCOPED_TRACE(buffer);
    Trained moved(with_buffer(overlapped(spec), buffer));
    EXPECT_EQ(moved.losses, resident.losses);
    EXPECT_TRUE(state_of(moved.engine, dir, fmt::format("moved_{}", buffer).c_str()) == expected);
  }
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

// The buffer has what it can hold of masters and moments, and the host has the rest.
TEST(OverlappedUpdate, KeepsTheFirstStatesInTheBuffer) {
  for (const auto& [name, optimizer] : kFormats) {
    SCOPED_TRACE(name);
    const EngineSpec spec = overlapped(spec_of(optimizer));
    const auto bytes = [&](double buffer) {
      EngineSpec null = with_buffer(spec, buffer);
      null.device = DeviceKind::null;
      const Engine engine(null);
      return std::pair{engine.plan().bytes(Life::host), engine.plan().bytes(Life::optimizer)};
    };
    const double all = bytes_on_host(spec);
    const auto [host, slots] = bytes(0);
    const auto [host_half, with_half] = bytes(all / 2);
    EXPECT_LE(with_half - slots, all / 2);
    EXPECT_GT(with_half - slots, all / 4);
    EXPECT_EQ(host - host_half, with_half - slots);
    EXPECT_EQ(bytes(2 * all).first, host - static_cast<int64_t>(all)) << "sums of gradients";
  }
}

TEST(OverlappedUpdate, IsCompleteBeforeOtherPasses) {
  const EngineSpec spec = spec_of({});
  Trained resident(spec);
  const auto loss = [&](Engine& engine) {
    fill(engine.batch(), spec, /*step=*/9, 0);
    engine.forward();
    return engine.loss();
  };
  const double expected = loss(resident.engine);
  for (const double buffer : buffers(overlapped(spec))) {
    Trained moved(with_buffer(overlapped(spec), buffer));
    EXPECT_EQ(loss(moved.engine), expected);
    EXPECT_EQ(masters(moved.engine), masters(resident.engine));
  }
}

// A run resumes from the checkpoint of a run with another buffer.
TEST(OverlappedUpdate, ResumesWithAnotherBuffer) {
  const TestDir dir;
  const std::unique_ptr<Transport> self = make_self_transport();
  Control control(*self);
  for (const auto& [name, optimizer] : kFormats) {
    SCOPED_TRACE(name);
    const EngineSpec spec = overlapped(spec_of(optimizer));
    const double half = bytes_on_host(spec) / 2;
    Engine whole(spec), first(with_buffer(spec, half)), second(with_buffer(spec, half / 4));
    const std::vector<double> expected = train(initialised(whole), 5);
    train(initialised(first), 2);
    const std::string folder = fmt::format("{}_first", name);
    state_of(first, dir, folder.c_str());
    load_checkpoint(second, control, dir.path(folder) + "/step-00000001");
    std::vector<double> losses = train(second, 1, /*first_step=*/3);
    fill(second.batch(), spec, /*step=*/9, 0);
    second.forward();  // an evaluation between steps
    second.end_of_step();
    for (const double loss : train(second, 2, /*first_step=*/4)) losses.push_back(loss);
    EXPECT_EQ(losses, std::vector<double>(expected.begin() + 2, expected.end()));
    second.finish_update();
    whole.finish_update();
    EXPECT_TRUE(state_of(second, dir, fmt::format("{}_second", name).c_str()) ==
                state_of(whole, dir, fmt::format("{}_whole", name).c_str()));
  }
}

TEST(OverlappedUpdate, OfGradientsThatAreNotFiniteChangesNothing) {
  const TestDir dir;
  const EngineSpec spec = overlapped(spec_of({}));
  Engine engine(with_buffer(spec, bytes_on_host(spec) / 2));
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

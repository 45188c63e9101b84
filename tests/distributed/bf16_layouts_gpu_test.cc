// Layouts of GPUs in bf16, with a model whose widths tensor cores take, on Hopper's kernels and on those of any GPU.
// Losses are those of one rank but for rounding. Bits are the same captured and eager, and after a resume.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include "device/accelerator.h"
#include "io/testing.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

constexpr int64_t kSteps = 6;  // four of them are replayed where steps are captured
const LayoutModel kWide{.wide = true};

struct Bf16Layout {
  const char* name;
  int ranks;
  ParallelSpec layout;
  KernelChoice kernels;
};

void PrintTo(const Bf16Layout& c, std::ostream* out) {
  *out << c.name << " on " << c.ranks << " ranks, " << name_of(c.kernels);
}

std::vector<Bf16Layout> with_both_kernels(const std::vector<Bf16Layout>& layouts) {
  std::vector<Bf16Layout> all;
  for (Bf16Layout c : layouts) {
    for (const KernelChoice kernels : {KernelChoice::automatic, KernelChoice::portable}) {
      c.kernels = kernels;
      all.push_back(c);
    }
  }
  return all;
}

const std::vector<Bf16Layout> kLayouts = with_both_kernels({
    {"one", 1, {}},
    {"dp2", 2, {}},
    {"ep2_direct", 2, {.ep = 2, .dispatcher = DispatcherKind::direct}},
    {"ep4_direct", 4, {.ep = 4, .dispatcher = DispatcherKind::direct}},
    {"ep2_allgather", 2, {.ep = 2, .dispatcher = DispatcherKind::allgather}},
    {"etp2_ep2_direct", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}},
    {"tp2_ep2", 2, {.tp = 2, .ep = 2}},
    {"pp2_vpp2", 2, {.pp = 2, .vpp = 2}},
    {"cp2_ring", 2, {.cp = 2, .cp_comm = CpComm::ring}},
    {"tp2_pp2", 4, {.tp = 2, .pp = 2}},
});

class Bf16LayoutsOnGpu : public ::testing::TestWithParam<Bf16Layout> {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }

  static LayoutWay way(bool graph) {
    return {.device = DeviceKind::cuda, .graph = graph, .compute = DType::bf16, .kernels = GetParam().kernels};
  }
};

TEST_P(Bf16LayoutsOnGpu, TrainTheModelOfOneRankWithTheSameBitsCaptured) {
  const Bf16Layout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got = train_on(world, kWide, c.layout, kSteps, way(false));
    expect_same_bits(train_on(world, kWide, c.layout, kSteps, way(true)), got);
    if (world.rank() != 0) return;
    // A logit of this model is about 1, of which bf16 keeps 2^-9. Later losses also have the noise of weights that were
    // updated in bf16, which the distance of one rank from f32 shows.
    const auto alone = [&](DType compute) {
      LayoutWay one = way(false);
      one.compute = compute;
      return train_on(*make_self_transport(), kWide, {}, kSteps, one).steps;
    };
    const std::vector<StepReport> bf16 = alone(DType::bf16), f32 = alone(DType::f32);
    double noise = 0;
    for (int64_t i = 0; i < kSteps; ++i) {
      noise = std::max(noise, std::abs(bf16[i].loss - f32[i].loss));
      EXPECT_NEAR(got.steps[i].loss, bf16[i].loss, 0x1p-6 * bf16[i].loss + 2 * noise) << "step " << i + 1;
    }
  });
}

TEST_P(Bf16LayoutsOnGpu, AResumedRunHasTheSameBits) {
  if (process_world() != nullptr) GTEST_SKIP() << "threads share the folder of the test, processes do not";
  const Bf16Layout& c = GetParam();
  constexpr int64_t kSaved = 3;
  const TestDir dir;
  const auto folder = [&](const char* run, int64_t step) { return dir.path(fmt::format("{}/step-{:08}", run, step)); };
  run_ranks(c.ranks, [&](Transport& world) {
    Control control(world);
    std::vector<double> losses;
    {
      Engine engine(layout_engine_spec(world, kWide, c.layout, way(true)));
      init_layout(engine, kWide);
      for (int64_t step = 1; step <= kSteps; ++step) {
        losses.push_back(layout_step(engine, kWide, step).loss);
        if (step == kSaved || step == kSteps) save_checkpoint(engine, control, dir.path("whole"), step);
      }
    }
    Engine engine(layout_engine_spec(world, kWide, c.layout, way(true)));
    load_checkpoint(engine, control, folder("whole", kSaved));
    for (int64_t step = kSaved + 1; step <= kSteps; ++step)
      EXPECT_EQ(layout_step(engine, kWide, step).loss, losses[step - 1]) << "step " << step;
    save_checkpoint(engine, control, dir.path("resumed"), kSteps);
  });
  if (HasFailure()) return;
  EXPECT_EQ(contents_of(folder("resumed", kSteps)), contents_of(folder("whole", kSteps)));
}

// Shares of weights and of sums of gradients, with several micro-batches in a step.
TEST_P(Bf16LayoutsOnGpu, SharesOnTheHostChangeNoBit) {
  const Bf16Layout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const auto losses = [&](bool on_host, bool graph) {
      EngineSpec spec = layout_engine_spec(world, kWide, c.layout, way(graph));
      spec.fsdp = spec.shard_gradients = true;
      spec.optimizer->grad = GradFormat::bf16;
      spec.optimizer->offload_grad = spec.offload_weights = on_host;
      Engine engine(spec);
      init_layout(engine, kWide);
      std::vector<double> all;
      for (int64_t step = 1; step <= kSteps; ++step) all.push_back(layout_step(engine, kWide, step).loss);
      return all;
    };
    const std::vector<double> on_device = losses(false, false);
    for (const bool graph : {false, true}) EXPECT_EQ(losses(true, graph), on_device);
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, Bf16LayoutsOnGpu, ::testing::ValuesIn(kLayouts), [](const auto& info) {
  return fmt::format("{}_on_{}_{}", info.param.name, info.param.ranks, name_of(info.param.kernels));
});

}  // namespace
}  // namespace moebius

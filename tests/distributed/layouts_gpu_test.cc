// The same model on every layout of GPUs. Ranks use NCCL where each has a GPU, else messages
// through host memory.
// Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <algorithm>

#include "device/accelerator.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "train/rank_report.h"

namespace moebius {
namespace {

// Steps of a run. Four of them, and two of the few, are replayed where steps are captured.
constexpr int64_t kSteps = 6, kFewSteps = 4;

struct GpuLayout {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model = {};
  KernelChoice kernels = KernelChoice::automatic;  // portable: in bf16 too
};

void PrintTo(const GpuLayout& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

const GpuLayout kLayouts[] = {
    {"dp2", 2, {}},
    {"dp4_sigmoid", 4, {}, {.sigmoid = true}},
    {"dp3_tied", 3, {}, {.tied = true}},
    {"ep2", 2, {.ep = 2}},
    {"ep2_skewed", 2, {.ep = 2}, {.skewed = true}},
    {"ep2_alltoall", 2, {.ep = 2, .dispatcher = DispatcherKind::alltoall}},
    {"ep4_allgather", 4, {.ep = 4, .dispatcher = DispatcherKind::allgather}},
    {"etp2_ep2_alltoall", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}},
    {"ep2_direct", 2, {.ep = 2, .dispatcher = DispatcherKind::direct}},
    {"ep4_direct_skewed", 4, {.ep = 4, .dispatcher = DispatcherKind::direct}, {.skewed = true}},
    {"pp2_ep2_direct", 4, {.pp = 2, .ep = 2, .dispatcher = DispatcherKind::direct}},
    {"etp2_ep2_direct", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::direct}},
    {"ep4_two_level", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}},
    {"ep4_two_level_skewed",
     4,
     {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2},
     {.skewed = true}},
    {"ep4_two_level_nodes_of_1", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 1}},
    {"etp2_ep2_two_level", 4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}},
    {"ep4_over_tp2_two_level_capacity",
     4,
     {.tp = 2, .ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2},
     {.capacity = true}},
    {"ep4_two_level_lora", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}, {.lora = true}},
    {"etp2", 2, {.etp = 2}},
    {"pp2", 2, {.pp = 2}},
    {"pp2_vpp2_tied", 2, {.pp = 2, .vpp = 2}, {.tied = true}},
    {"pp2_zb_h1_tied", 2, {.pp = 2, .schedule = PipelineSchedule::zb_h1}, {.tied = true}},
    {"pp2_vpp2_ep2_sigmoid", 4, {.pp = 2, .vpp = 2, .ep = 2}, {.sigmoid = true}},
    {"dp2_capacity", 2, {}, {.capacity = true}},
    {"tp2", 2, {.tp = 2}},
    {"tp2_nodes_of_1", 2, {.tp = 2, .ranks_per_node = 1}},  // exchanges overlap with products
    {"tp2_latent_nodes_of_1", 2, {.tp = 2, .ranks_per_node = 1}, {.latent_qkv = true}},
    {"cp2_nodes_of_1", 2, {.cp = 2, .ranks_per_node = 1}},
    {"tp2_pp2_tied", 4, {.tp = 2, .pp = 2}, {.tied = true}},
    {"cp2", 2, {.cp = 2}},
    {"tp2_cp2_ring", 4, {.tp = 2, .cp = 2, .cp_comm = CpComm::ring}},
    {"cp2_alltoall", 2, {.cp = 2, .cp_comm = CpComm::alltoall}},
    {"ep4_over_tp2_cp2", 4, {.tp = 2, .cp = 2, .ep = 4, .dispatcher = DispatcherKind::allgather}},
    {"tp2_latent", 2, {.tp = 2}, {.latent_qkv = true}},
    {"tp2_cp2_ring_latent_kv", 4, {.tp = 2, .cp = 2, .cp_comm = CpComm::ring}, {.latent_kv = true}},
    {"pp2_uneven_mtp", 2, {.pp = 2, .layout = "E t*3 | t m*2 L"}, {.mtp = 2}},
    {"pp2_vpp2_mtp_tied", 2, {.pp = 2, .vpp = 2}, {.tied = true, .mtp = 1}},
    {"tp2_mtp", 2, {.tp = 2}, {.mtp = 2}},
    {"ep2_gpt_oss", 2, {.ep = 2}, {.gpt_oss = true}},
    {"tp2_gpt_oss", 2, {.tp = 2}, {.gpt_oss = true}},
    {"cp2_ring_gpt_oss", 2, {.cp = 2, .cp_comm = CpComm::ring}, {.gpt_oss = true}},
    {"dp2_clipped", 2, {}, {.clipped = true}},
    {"dp2_frozen", 2, {}, {.freeze = kParts}},
    {"pp2_frozen_tied", 2, {.pp = 2}, {.tied = true, .freeze = kTable}},
};

// The same layouts, where this is possible with widths that are multiples of 16. Their steps are short, since
// their runs are compared with each other: each rank has two micro-batches, and twice as many as stages where
// there is a pipeline.
std::vector<GpuLayout> portable_layouts() {
  std::vector<GpuLayout> layouts(std::begin(kLayouts), std::end(kLayouts));
  for (GpuLayout& c : layouts) {
    c.kernels = KernelChoice::portable;
    const MeshShape mesh = mesh_shape(c.layout, c.ranks);
    c.model.sequences = 2 * mesh.dp * 2 * mesh.pp;  // two in a micro-batch
    c.model.wide = !c.model.gpt_oss && !c.model.latent_qkv && !c.model.latent_kv && !c.model.skewed;
  }
  return layouts;
}

class GpuLayouts : public ::testing::TestWithParam<GpuLayout> {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  // A step whose counts are read by the host is not captured.
  static bool graph() { return GetParam().layout.dispatcher != DispatcherKind::alltoall; }
  static LayoutWay on_gpu(LayoutWay way) {
    way.device = DeviceKind::cuda;
    if (is_portable()) way.compute = DType::bf16;
    way.kernels = GetParam().kernels;
    return way;
  }
  static int64_t steps() { return is_portable() ? kFewSteps : kSteps; }
  static bool is_portable() { return GetParam().kernels == KernelChoice::portable; }
};

LayoutOutcome alone_on_gpu(const LayoutModel& what) {
  const std::unique_ptr<Transport> self = make_self_transport();
  return train_on(*self, what, {}, kSteps, {.device = DeviceKind::cuda});
}

TEST_P(GpuLayouts, TrainTheModelOfOneRank) {
  const GpuLayout& c = GetParam();
  if (is_portable()) GTEST_SKIP() << "the test of portable kernels has a bound for bf16";
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got =
        train_on(world, c.model, c.layout, kSteps, {.device = DeviceKind::cuda, .graph = graph()});
    if (world.rank() == 0) expect_same(got, alone_on_gpu(c.model));
  });
}

TEST_P(GpuLayouts, CapturingAndOverlapChangeNoBit) {
  const GpuLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const auto train = [&](const LayoutWay& way) { return train_on(world, c.model, c.layout, steps(), on_gpu(way)); };
    const LayoutOutcome plain = train({.overlap = false, .graph = false});
    expect_same_bits(train({.overlap = true, .graph = false}), plain);
    if (!graph()) return;
    expect_same_bits(train({.overlap = true, .graph = true}), plain);
    expect_same_bits(train({.overlap = false, .graph = true}), plain);
    if (c.layout.ep * c.layout.etp == 1) return;
    for (const bool captured : {false, true})
      expect_same_bits(train_on(world, c.model, with_expert_overlap(c.layout), steps(), on_gpu({.graph = captured})),
                       plain);
  });
}

// Sharded gradients have the same bits where each rank has one micro-batch. Steps are captured where each rank has
// a GPU.
TEST_P(GpuLayouts, ShardedLayersChangeNoBit) {
  const GpuLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    for (const bool captured : {false, true}) {
      if (captured && !graph()) continue;
      const auto train = [&](LayoutWay way) {
        way.graph = captured;
        return train_on(world, c.model, c.layout, steps(), on_gpu(way));
      };
      const LayoutOutcome whole = train({});
      for (const bool overlap : {true, false}) expect_same_bits(train({.overlap = overlap, .fsdp = true}), whole);
      if (c.ranks == 4) expect_same_bits(train({.fsdp = true, .fsdp_shard = 2}), whole);
      if (c.layout.schedule != PipelineSchedule::zb_h1)
        expect_same_bits(train({.fsdp = true, .fsdp_shard = c.ranks == 4 ? 2 : 0, .offload_weights = true}), whole);
      if (c.layout.vpp > 1) continue;  // virtual stages need several micro-batches
      const LayoutOutcome one = train({.num_micro_batches = 1});
      expect_same_bits(train({.shard_gradients = true, .num_micro_batches = 1}), one);
      expect_same_bits(train({.fsdp = true, .shard_gradients = true, .num_micro_batches = 1}), one);
    }
  });
}

TEST_P(GpuLayouts, BudgetsOfExpertRowsChangeNoBit) {
  const GpuLayout& c = GetParam();
  if (c.layout.ep == 1) GTEST_SKIP() << "a rank has all experts";
  run_ranks(c.ranks, [&](Transport& world) {
    const auto train = [&](double budget, bool graph) {
      return train_on(world, c.model, c.layout, steps(), on_gpu({.graph = graph, .expert_rows = budget}));
    };
    const LayoutOutcome unbounded = train(0, false);
    for (const double budget : {1.25, 0.1}) {
      expect_same_bits(train(budget, false), unbounded);
      if (graph()) expect_same_bits(train(budget, true), unbounded);
    }
  });
}

TEST_P(GpuLayouts, ActivationsOnTheHostChangeNoBit) {
  const GpuLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const auto train = [&](const OffloadSpec& offload, const RecomputeSpec& recompute, bool graph) {
      return train_on(world, c.model, c.layout, steps(),
                      on_gpu({.recompute = recompute, .offload = offload, .graph = graph}));
    };
    const LayoutOutcome kept = train({}, {}, false);
    for (const bool captured : {false, true}) {
      if (captured && !graph()) continue;
      expect_same_bits(train({.tensors = {.layer = true}}, {}, captured), kept);
      expect_same_bits(train({.layer_input = true}, {.layer = true}, captured), kept);
      expect_same_bits(train({.tensors = {.qkv = true, .attention = true}, .fraction = 0.5}, {}, captured), kept);
    }
  });
}

// In bf16, on the kernels that any GPU of compute capability 8.0 runs. The losses of a layout are those of one rank
// but for rounding: a logit of these models is about 1, of which bf16 keeps 2^-9.
TEST_P(GpuLayouts, PortableKernelsTrainTheModelOfOneRankWithTheSameBitsCaptured) {
  const GpuLayout& c = GetParam();
  if (is_portable()) GTEST_SKIP() << "Everywhere has all layouts";
  constexpr double kRounding = 0x1p-6;
  const LayoutWay eager{
      .device = DeviceKind::cuda, .graph = false, .compute = DType::bf16, .kernels = KernelChoice::portable};
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got = train_on(world, c.model, c.layout, kSteps, eager);
    if (graph()) {
      LayoutWay captured = eager;
      captured.graph = true;
      expect_same_bits(train_on(world, c.model, c.layout, kSteps, captured), got);
    }
    if (world.rank() != 0) return;
    const LayoutOutcome alone = train_on(*make_self_transport(), c.model, {}, kSteps, eager);
    for (int64_t i = 0; i < kSteps; ++i)
      EXPECT_NEAR(got.steps[i].loss, alone.steps[i].loss, kRounding * alone.steps[i].loss) << "step " << i + 1;
  });
}

TEST_P(GpuLayouts, TimesOfRanksAreThoseOfTheGpu) {
  const GpuLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    Engine engine(layout_engine_spec(world, c.model, c.layout, on_gpu({.graph = graph()})));
    init_layout(engine, c.model);
    for (int64_t step = 1; step <= 4; ++step) {
      const CommCounters before = comm_counters(engine.mesh());
      const double begin = now_us();
      const StepReport report = layout_step(engine, c.model, step);
      const double step_s = (now_us() - begin) * 1e-6;
      const CommCounters comm = comm_since(engine.mesh(), before);
      const RankTimes mine{.passes_s = engine.step_times().passes_s, .optimizer_s = engine.step_times().optimizer_s};
      for (const RankTimes& rank : gather_ranks(engine, mine, comm, report.layers).ranks) {
        EXPECT_GT(rank.passes_s, 0);
        EXPECT_GT(rank.optimizer_s, 0);
        EXPECT_GE(rank.waiting_s, 0);
        EXPECT_LE(rank.waiting_s, rank.passes_s + rank.optimizer_s);
      }
      EXPECT_LE(mine.passes_s + mine.optimizer_s, step_s);
    }
  });
}

// All ranks trace the step, since a collective is captured by all ranks or by none.
TEST_P(GpuLayouts, ATracedStepChangesNoBit) {
  const GpuLayout& c = GetParam();
  const auto losses = [&](Transport& world, bool traced) {
    Trace trace;
    Engine engine(layout_engine_spec(world, c.model, c.layout, on_gpu({.graph = graph()})));
    init_layout(engine, c.model);
    std::vector<double> all;
    for (int64_t step = 1; step <= 5; ++step) {
      engine.set_trace(traced && step == 2 ? &trace : nullptr);
      all.push_back(layout_step(engine, c.model, step).loss);
    }
    EXPECT_EQ(trace.events().empty(), !traced);
    return all;
  };
  run_ranks(c.ranks, [&](Transport& world) { EXPECT_EQ(losses(world, true), losses(world, false)); });
}

std::string name_of_case(const ::testing::TestParamInfo<GpuLayout>& info) {
  return fmt::format("{}_on_{}", info.param.name, info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLayouts, ::testing::ValuesIn(kLayouts), name_of_case);
INSTANTIATE_TEST_SUITE_P(Portable, GpuLayouts, ::testing::ValuesIn(portable_layouts()), name_of_case);

}  // namespace
}  // namespace moebius

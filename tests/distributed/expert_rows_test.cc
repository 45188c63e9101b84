// Budgets of rows of experts that hold all rows of a step, some of them, or nearly none: the bits of a step are those
// of a plan for the worst case. On a GPU the sizes are such that each kernel of its architecture runs.
#include <gtest/gtest.h>

#include "device/accelerator.h"
#include "engine/engine_testing.h"
#include "tests/distributed/ranks.h"
#include "tests/equivalence/tiny.h"
#include "train/metrics.h"

namespace moebius {
namespace {

// On a GPU the last ones are replayed.
int64_t num_steps(DeviceKind device) { return device == DeviceKind::cuda ? 6 : 2; }

struct Case {
  const char* name;
  int ranks;
  MeshShape mesh;
  DispatcherKind dispatcher;
  PipelineSpec pipeline = {};
  // The bias of the first two experts, both of the first rank. At 100 they get every token; at 1 most.
  double skew = 1;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

EngineSpec spec_of(const Case& c, DeviceKind device, DType compute) {
  ModelSpec m = testing::tiny_model();
  m.vocab_size = m.hidden_size = 128;
  m.head_dim = 64;
  m.num_experts = 8;
  m.moe_intermediate_size = 128;
  m.shared_intermediate_size = 64;
  m.initializer_range = 0.1;
  m.expert_bias = true;
  m.score = ScoreFunction::sigmoid;
  m.check();
  EngineSpec spec = testing::tiny_engine(m, /*batch=*/2, compute, 1);
  spec.shape = {.batch = 2, .seq = 64, .max_segments = 2, .documents = false};
  spec.num_micro_batches = 4;
  spec.mesh = c.mesh;
  spec.pipeline = c.pipeline;
  spec.dispatcher = c.dispatcher;
  spec.device = spec.target = device;
  spec.graph = false;
  return spec;
}

void set_skew(Engine& engine, double skew) {
  Stream s = engine.stream();
  for (const Param& p : engine.model().params().all()) {
    if (p.spec.name.find("e_score_correction_bias") == std::string::npos) continue;
    std::vector<float> bias(static_cast<size_t>(p.w.numel()));
    bias[0] = bias[1] = static_cast<float>(skew);
    copy_to_device(s, p.w.data, bias.data(), p.w.num_bytes());
    synchronize(s);
  }
}

struct Trained {
  std::vector<double> losses, grad_norms;
  std::vector<float> masters;  // of this rank, on a CPU
  int64_t spilled_rows = 0;    // of the last step
  double peak_over_budget = 0;
};

Trained train_on(Transport& world, EngineSpec spec, double skew) {
  spec.world = &world;
  Engine engine(spec);
  testing::init_params(engine);
  set_skew(engine, skew);
  Trained trained;
  for (int64_t step = 1; step <= num_steps(spec.device); ++step) {
    const int64_t all = spec.num_micro_batches * spec.shape.batch * spec.mesh.dp;
    for (int64_t m = 0; m < spec.num_micro_batches; ++m) {
      const int64_t first = (m * spec.mesh.dp + engine.data_share().dp_rank) * spec.shape.batch;
      testing::fill_random(engine.batch(m), spec.model, step, first, all);
    }
    engine.step(step, 1e-2);
    const StepReport report = read_step(engine, /*step_time_s=*/1);
    trained.losses.push_back(report.loss);
    trained.grad_norms.push_back(report.grad_norm);
    if (report.expert_rows) {
      trained.spilled_rows = report.expert_rows->spilled_rows;
      trained.peak_over_budget = report.expert_rows->peak_over_budget;
      EXPECT_GE(report.expert_rows->spill_time_s, 0);
    }
    engine.end_of_step();
  }
  if (spec.device == DeviceKind::cpu) trained.masters = testing::all_elements(engine, false);
  return trained;
}

void expect_same(const Trained& got, const Trained& want) {
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_EQ(got.grad_norms, want.grad_norms);
  EXPECT_EQ(got.masters, want.masters);
}

const Case kCases[] = {
    {"ep2_allgather", 2, {.dp = 2, .ep = 2}, DispatcherKind::allgather},
    {"ep2_direct_all", 2, {.dp = 2, .ep = 2}, DispatcherKind::direct, {}, 100},
    {"ep2_alltoall_all", 2, {.dp = 2, .ep = 2}, DispatcherKind::alltoall, {}, 100},
    {"ep4_direct", 4, {.dp = 4, .ep = 4}, DispatcherKind::direct},
    {"ep4_two_level", 4, {.dp = 4, .ep = 4, .ranks_per_node = 2}, DispatcherKind::two_level},
    {"ep4_allgather_all", 4, {.dp = 4, .ep = 4}, DispatcherKind::allgather, {}, 100},
    {"etp2_ep2_alltoall", 4, {.dp = 4, .etp = 2, .ep = 2}, DispatcherKind::alltoall},
    {"pp2_ep2_direct_all", 4, {.dp = 2, .pp = 2, .ep = 2}, DispatcherKind::direct, {.layout = "Ett|tL"}, 100},
    {"pp2_vpp2_ep2_allgather_all",
     4,
     {.dp = 2, .pp = 2, .ep = 2},
     DispatcherKind::allgather,
     {.num_virtual = 2, .layout = "Et|t|t|L"},
     100},
};

class ExpertRowBudgets : public ::testing::TestWithParam<Case> {
 protected:
  // The rows of one step fit the first budget of a pass, where experts are even. 1e-9: one page for each pass.
  static void expect_budgets_change_no_bit(Transport& world, EngineSpec spec, bool graph) {
    const double skew = GetParam().skew;
    const Trained unbounded = train_on(world, spec, skew);
    EXPECT_NE(unbounded.losses.front(), unbounded.losses.back());
    for (const double budget : {1.25, 0.5, 1e-9}) {
      SCOPED_TRACE(budget);
      spec.expert_rows = budget;
      spec.graph = false;
      const Trained got = train_on(world, spec, skew);
      expect_same(got, unbounded);
      if (budget < 1) {
        EXPECT_GT(got.spilled_rows, 0);
        EXPECT_GT(got.peak_over_budget, 1);
      }
      if (!graph) continue;
      spec.graph = true;
      expect_same(train_on(world, spec, skew), unbounded);
    }
    spec.expert_rows = 0.5;
    spec.recompute.expert_up = true;  // rows of the layer that runs alone have a budget
    expect_same(train_on(world, spec, skew), unbounded);
  }
};

TEST_P(ExpertRowBudgets, ChangeNoBit) {
  const Case& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    for (const DType compute : {DType::f32, DType::bf16})
      expect_budgets_change_no_bit(world, spec_of(c, DeviceKind::cpu, compute), false);
  });
}

TEST_P(ExpertRowBudgets, ChangeNoBitOnAGpu) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const Case& c = GetParam();
  if (c.dispatcher == DispatcherKind::two_level) GTEST_SKIP() << "the two-level dispatcher is for CPUs";
  run_ranks(c.ranks, [&](Transport& world) {
    expect_budgets_change_no_bit(world, spec_of(c, DeviceKind::cuda, DType::bf16),
                                 c.dispatcher != DispatcherKind::alltoall);
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, ExpertRowBudgets, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

}  // namespace
}  // namespace moebius

// Budgets of rows of experts that hold all rows of a step, some of them, or nearly none: the bits of a step are those
// of a plan for the worst case. On a GPU the sizes are such that each kernel of its architecture runs.
#include <gtest/gtest.h>

#include "device/accelerator.h"
#include "tests/distributed/expert_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

struct Case {
  const char* name;
  int ranks;
  MeshShape mesh;
  DispatcherKind dispatcher;
  PipelineSpec pipeline = {};
  // The bias of the first two experts, both of the first rank. At 100 they get every token; at 1 most.
  double skew = 1;
  KernelChoice kernels = KernelChoice::automatic;  // of a GPU
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

EngineSpec spec_of(const Case& c, DeviceKind device, DType compute) {
  EngineSpec spec = expert_spec(c.mesh, c.dispatcher, device, compute);
  spec.pipeline = c.pipeline;
  spec.kernels = c.kernels;
  return spec;
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
    {"pp2_zb_h1_ep2_direct_all",
     4,
     {.dp = 2, .pp = 2, .ep = 2},
     DispatcherKind::direct,
     {.schedule = PipelineSchedule::zb_h1, .layout = "Ett|tL"},
     100},
    {"pp2_vpp2_ep2_allgather_all",
     4,
     {.dp = 2, .pp = 2, .ep = 2},
     DispatcherKind::allgather,
     {.num_virtual = 2, .layout = "Et|t|t|L"},
     100},
};

std::vector<Case> portable_cases() {
  std::vector<Case> cases;
  for (Case c : kCases) {
    c.kernels = KernelChoice::portable;
    cases.push_back(c);
  }
  return cases;
}

class ExpertRowBudgets : public ::testing::TestWithParam<Case> {
 protected:
  // The rows of one step fit the first budget of a pass, where experts are even. 1e-9: one page for each pass.
  static void expect_budgets_change_no_bit(Transport& world, EngineSpec spec, bool graph) {
    const double skew = GetParam().skew;
    const TrainedExperts unbounded = train_experts(world, spec, skew);
    EXPECT_NE(unbounded.losses.front(), unbounded.losses.back());
    for (const double budget : {1.25, 0.5, 1e-9}) {
      SCOPED_TRACE(budget);
      spec.expert_rows = budget;
      spec.graph = false;
      const TrainedExperts got = train_experts(world, spec, skew);
      expect_same(got, unbounded);
      if (budget < 1) {
        EXPECT_GT(got.spilled_rows, 0);
        EXPECT_GT(got.peak_over_budget, 1);
      }
      if (!graph) continue;
      spec.graph = true;
      expect_same(train_experts(world, spec, skew), unbounded);
    }
    expect_counters_name_a_budget(world, spec, skew);
    spec.expert_rows = 0.5;
    spec.recompute.expert_up = true;  // rows of the layer that runs alone have a budget
    expect_same(train_experts(world, spec, skew), unbounded);
  }

  // docs/design/memory.md has the budget with which all rows of a step would have had a page.
  static void expect_counters_name_a_budget(Transport& world, EngineSpec spec, double skew) {
    const auto even = static_cast<double>(spec.shape.batch * spec.shape.seq * spec.model.top_k * spec.mesh.etp);
    spec.graph = false;
    for (const double budget : {0.5, 1e-9}) {
      spec.expert_rows = budget;
      const double peak = train_experts(world, spec, skew).peak_over_budget;
      spec.expert_rows = budget * peak + 64 * (1 + peak) / even;
      EXPECT_EQ(train_experts(world, spec, skew).spilled_rows, 0) << budget << " " << peak;
    }
  }

  static void expect_budgets_change_no_bit_on_a_gpu() {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
    const Case& c = GetParam();
    run_ranks(c.ranks, [&](Transport& world) {
      expect_budgets_change_no_bit(world, spec_of(c, DeviceKind::cuda, DType::bf16),
                                   c.dispatcher != DispatcherKind::alltoall);
    });
  }
};

TEST_P(ExpertRowBudgets, ChangeNoBit) {
  const Case& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    for (const DType compute : {DType::f32, DType::bf16})
      expect_budgets_change_no_bit(world, spec_of(c, DeviceKind::cpu, compute), false);
  });
}

TEST_P(ExpertRowBudgets, ChangeNoBitOnAGpu) { expect_budgets_change_no_bit_on_a_gpu(); }

class PortableExpertRowBudgets : public ExpertRowBudgets {};

TEST_P(PortableExpertRowBudgets, ChangeNoBitOnAGpu) { expect_budgets_change_no_bit_on_a_gpu(); }

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return fmt::format("{}_on_{}", info.param.name, info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(Everywhere, ExpertRowBudgets, ::testing::ValuesIn(kCases), name_of_case);
INSTANTIATE_TEST_SUITE_P(Everywhere, PortableExpertRowBudgets, ::testing::ValuesIn(portable_cases()), name_of_case);

}  // namespace
}  // namespace moebius

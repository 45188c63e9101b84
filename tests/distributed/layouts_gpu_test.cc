// The same model on every layout of GPUs: ranks of NCCL where each has a GPU, else messages through host memory.
// Skipped where there is none.
#include <gtest/gtest.h>

#include "core/accelerator.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

constexpr int64_t kSteps = 6;  // four of them are replayed where steps are recorded

struct GpuLayout {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model = {};
};

void PrintTo(const GpuLayout& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

const GpuLayout kLayouts[] = {
    {"dp2", 2, {}},
    {"dp4_sigmoid", 4, {}, {.sigmoid = true}},
    {"dp3_tied", 3, {}, {.tied = true}},
    {"ep2", 2, {.ep = 2}},
    {"ep2_skewed", 2, {.ep = 2}, {.skewed = true}},
    {"ep2_alltoall", 2, {.ep = 2, .dispatcher = "alltoall"}},
    {"ep4_allgather", 4, {.ep = 4, .dispatcher = "allgather"}},
    {"etp2_ep2_alltoall", 4, {.ep = 2, .etp = 2, .dispatcher = "alltoall"}},
    {"etp2", 2, {.etp = 2}},
    {"pp2", 2, {.pp = 2}},
    {"pp2_vpp2_tied", 2, {.pp = 2, .vpp = 2}, {.tied = true}},
    {"pp2_vpp2_ep2_sigmoid", 4, {.pp = 2, .vpp = 2, .ep = 2}, {.sigmoid = true}},
    {"dp2_capacity", 2, {}, {.capacity = true}},
    {"tp2", 2, {.tp = 2}},
    {"tp2_pp2_tied", 4, {.tp = 2, .pp = 2}, {.tied = true}},
    {"cp2", 2, {.cp = 2}},
    {"tp2_cp2_ring", 4, {.tp = 2, .cp = 2, .cp_comm = CpComm::ring}},
    {"cp2_alltoall", 2, {.cp = 2, .cp_comm = CpComm::alltoall}},
    {"ep4_over_tp2_cp2", 4, {.tp = 2, .cp = 2, .ep = 4}},
    {"tp2_latent", 2, {.tp = 2}, {.latent_qkv = true}},
    {"tp2_cp2_ring_latent_kv", 4, {.tp = 2, .cp = 2, .cp_comm = CpComm::ring}, {.latent_kv = true}},
};

class GpuLayouts : public ::testing::TestWithParam<GpuLayout> {
 protected:
  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  // A step whose counts are read by the host is not recorded.
  static bool graph() { return GetParam().layout.dispatcher != "alltoall"; }
};

LayoutOutcome alone_on_gpu(const LayoutModel& what) {
  const std::unique_ptr<Transport> self = make_self_transport();
  return train_on(*self, what, {}, kSteps, {.device = DeviceKind::cuda});
}

TEST_P(GpuLayouts, TrainTheModelOfOneRank) {
  const GpuLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got =
        train_on(world, c.model, c.layout, kSteps, {.device = DeviceKind::cuda, .graph = graph()});
    if (world.rank() == 0) expect_same(got, alone_on_gpu(c.model));
  });
}

TEST_P(GpuLayouts, RecordingAndOverlapChangeNoBit) {
  const GpuLayout& c = GetParam();
  run_ranks(c.ranks, [&](Transport& world) {
    const auto train = [&](const LayoutWay& way) { return train_on(world, c.model, c.layout, kSteps, way); };
    const LayoutOutcome plain = train({.overlap = false, .device = DeviceKind::cuda, .graph = false});
    expect_same_bits(train({.overlap = true, .device = DeviceKind::cuda, .graph = false}), plain);
    if (!graph()) return;
    expect_same_bits(train({.overlap = true, .device = DeviceKind::cuda, .graph = true}), plain);
    expect_same_bits(train({.overlap = false, .device = DeviceKind::cuda, .graph = true}), plain);
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, GpuLayouts, ::testing::ValuesIn(kLayouts),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

}  // namespace
}  // namespace moebius

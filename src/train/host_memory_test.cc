#include "train/host_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/store.h"
#include "comm/transport/threads.h"
#include "core/error.h"
#include "engine/engine_testing.h"
#include "io/testing.h"

namespace moebius {
namespace {

TEST(HostMemory, ASnapshotThatDoesNotFitIsRefused) {
  MemoryPlan plan;
  const HostMemory gpu{.pinned_bytes = 7, .snapshot_bytes = 100}, cpu{.plan_bytes = 50, .snapshot_bytes = 100};
  check_snapshot(gpu, plan, 100);
  check_snapshot(cpu, plan, 150);
  check_snapshot({.plan_bytes = 50}, plan, 0);  // no snapshot: the plan was compared by the engine
  const auto refused = [&](const HostMemory& host, int64_t available, const std::string& text) {
    expect_error(ErrorKind::usage, text, [&] { check_snapshot(host, plan, available); });
  };
  refused(gpu, 99,
          "out of memory: an asynchronous checkpoint copies 100 B in the host's memory, and 99 B are available; set "
          "checkpoint.async = false");
  refused(cpu, 149, "copies 100 B in the host's memory in addition to the plan of 50 B, and 149 B are available");
  refused(cpu, 149, "memory plan\n");
}

TEST(HostMemory, RowsOfExpertsBeyondTheirBudgetThatDoNotFitAreRefused) {
  MemoryPlan plan;
  const HostMemory gpu{.snapshot_bytes = 3, .num_ranks = 2, .spill_bytes = 40}, cpu{.plan_bytes = 9, .spill_bytes = 40};
  check_spill(gpu, plan, 43);
  check_spill(cpu, plan, 49);
  check_spill({.plan_bytes = 9}, plan, 0);
  const auto refused = [&](const HostMemory& host, int64_t available, const std::string& text) {
    expect_error(ErrorKind::usage, text, [&] { check_spill(host, plan, available); });
  };
  refused(
      gpu, 42,
      "rows of experts beyond memory.expert_rows take up to 40 B of the host's memory if tokens choose the experts "
      "of one rank, of 2 ranks together, in addition to 3 B of the plan and a checkpoint's copy, and 42 B are available; "
      "set a larger memory.expert_rows or 0");
  refused(cpu, 48, "in addition to 9 B of the plan and a checkpoint's copy, and 48 B are available");
}

TEST(HostMemory, ReportsUncountedMemory) {
  EXPECT_EQ((HostMemory{.pinned_bytes = 7, .snapshot_bytes = 5}.text()),
            "of the host 7 B pinned, checkpoint snapshot 5 B");
  EXPECT_EQ((HostMemory{.pinned_bytes = 7, .snapshot_bytes = 5, .stages_messages = true}.text()),
            "of the host 7 B pinned (without the buffers that messages between ranks are staged through), checkpoint "
            "snapshot 5 B");
}

TEST(HostMemory, TheRanksOfAMachineShareIt) {
  run_threads(3, {.timeout_s = 30}, [](Transport& world) {
    Control control(world);
    const HostMemory all = of_this_machine(control, {.plan_bytes = 10,
                                                     .pinned_bytes = 1,
                                                     .snapshot_bytes = 100 + control.rank(),
                                                     .spill_bytes = 1000 + control.rank()});
    EXPECT_EQ(all.plan_bytes, 30);
    EXPECT_EQ(all.pinned_bytes, 3);
    EXPECT_EQ(all.snapshot_bytes, 303);
    EXPECT_EQ(all.spill_bytes, 3003);
    EXPECT_EQ(all.num_ranks, 3);
    const MemoryPlan plan;
    check_snapshot(all, plan, 333);
    expect_error(ErrorKind::usage,
                 "copies 303 B in the host's memory in addition to the plan of 30 B, of 3 ranks together, and",
                 [&] { check_snapshot(all, plan, 332); });
  });
}

// Twelve bytes a parameter, whole parameters of a multiple of 64 bytes, and more where
// they are not.
TEST(HostMemory, OfAGpuIsKnownWithoutOne) {
  EngineSpec spec = huge_spec(DeviceKind::null);
  spec.target = DeviceKind::cuda;
  spec.num_micro_batches = 5;
  Engine engine(spec);
  int64_t parameters = 0;
  for (const Param& p : engine.model().params().all()) parameters += p.has_grad ? p.w.numel() : 0;
  const HostMemory async = host_memory(engine, true), sync = host_memory(engine, false);
  EXPECT_GE(async.snapshot_bytes, 12 * parameters);
  EXPECT_LE(async.snapshot_bytes, 12 * parameters + (1 << 20));
  EXPECT_EQ(sync.snapshot_bytes, 0);
  EXPECT_EQ(async.pinned_bytes, 5 * engine.plan().bytes(Life::batch) + engine.plan().bytes(Life::metrics));
  EXPECT_EQ(sync.pinned_bytes - async.pinned_bytes, CheckpointStore::kPieceBytes);
}

}  // namespace
}  // namespace moebius

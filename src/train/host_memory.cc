#include "train/host_memory.h"

#include "checkpoint/store.h"
#include "comm/machine.h"
#include "train/state.h"

namespace moebius {

std::string HostMemory::text() const {
  if (pinned_bytes == 0) return fmt::format("checkpoint snapshot {}", bytes_text(snapshot_bytes));
  return fmt::format("of the host {} pinned{}, checkpoint snapshot {}", bytes_text(pinned_bytes),
                     stages_messages ? " (without the buffers that messages between ranks are staged through)" : "",
                     bytes_text(snapshot_bytes));
}

HostMemory host_memory(Engine& engine, bool async_save) {
  const bool on_gpu = engine.spec().target == DeviceKind::cuda;
  HostMemory host{.plan_bytes = on_gpu ? 0 : engine.plan().total_bytes(),
                  .pinned_bytes = engine.pinned_bytes(),
                  .stages_messages = engine.stages_messages(),
                  .spill_bytes = engine.plan().spill_bytes()};
  if (async_save) host.snapshot_bytes = CheckpointStore::snapshot_bytes_of(training_state(engine));
  if (on_gpu && !async_save) host.pinned_bytes += CheckpointStore::kPieceBytes;
  return host;
}

HostMemory of_this_machine(Control& control, const HostMemory& mine) {
  const std::vector<int> ranks = ranks_of_machine(control);
  const auto sum = [&](int64_t bytes) { return sum_of_ranks(control, ranks, bytes); };
  return {.plan_bytes = sum(mine.plan_bytes),
          .pinned_bytes = sum(mine.pinned_bytes),
          .snapshot_bytes = sum(mine.snapshot_bytes),
          .num_ranks = std::ssize(ranks),
          .spill_bytes = sum(mine.spill_bytes)};
}

void check_snapshot(const HostMemory& host, const MemoryPlan& plan, int64_t available) {
  const int64_t needed = host.plan_bytes + host.snapshot_bytes;
  MOEBIUS_CHECK(
      usage, host.snapshot_bytes == 0 || needed <= available,
      "out of memory: an asynchronous checkpoint copies {} in the host's memory{}{}, and {} are available; set "
      "checkpoint.async = false (a save then takes no copy, and the steps wait for it), or use a larger machine\n{}",
      bytes_text(host.snapshot_bytes),
      host.plan_bytes > 0 ? fmt::format(" in addition to the plan of {}", bytes_text(host.plan_bytes)) : "",
      host.num_ranks > 1 ? fmt::format(", of {} ranks together", host.num_ranks) : "", bytes_text(available),
      plan.table());
}

void check_spill(const HostMemory& host, const MemoryPlan& plan, int64_t available) {
  const int64_t beside = host.plan_bytes + host.snapshot_bytes, needed = beside + host.spill_bytes;
  MOEBIUS_CHECK(
      usage, host.spill_bytes == 0 || needed <= available,
      "out of memory: rows of experts beyond memory.expert_rows take up to {} of the host's memory if tokens choose "
      "the experts of one rank{}{}, and {} are available; set a larger memory.expert_rows or 0 (then the device has "
      "memory for them), a smaller train.micro_batch or train.seq_len, or use a larger machine\n{}",
      bytes_text(host.spill_bytes), host.num_ranks > 1 ? fmt::format(", of {} ranks together", host.num_ranks) : "",
      beside > 0 ? fmt::format(", in addition to {} of the plan and a checkpoint's copy", bytes_text(beside)) : "",
      bytes_text(available), plan.table());
}

}  // namespace moebius

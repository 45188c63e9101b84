// The prediction of the host memory of a run, without the program itself, before its first step.
#pragma once

#include <cstdint>
#include <string>

#include "comm/control.h"
#include "engine/engine.h"

namespace moebius {

struct HostMemory {
  int64_t plan_bytes = 0;        // the plan, for a run on the CPU
  int64_t pinned_bytes = 0;      // for a GPU's copies: batches and sums of a step, and pieces of a checkpoint
  int64_t snapshot_bytes = 0;    // the copy that an asynchronous checkpoint makes
  int64_t num_ranks = 1;         // ranks whose memory this is
  bool stages_messages = false;  // messages between GPUs need more pinned memory, which is not predicted
  // Rows of experts beyond memory.expert_rows, for the most uneven routing. This memory is used when such routing
  // happens, and stays in use.
  int64_t spill_bytes = 0;
  std::string text() const;  // "of the host 1.2 MiB pinned, checkpoint snapshot 3.4 GiB"; without a GPU the latter
};

// Returns the host memory of a training engine, which may be on the null device.
HostMemory host_memory(Engine& engine, bool async_save);

// Returns the sum over the ranks of this machine. All ranks of the world call it together.
HostMemory of_this_machine(Control& control, const HostMemory& mine);

// Throws Error{usage} with the plan's table when the host lacks memory for plan and checkpoint snapshot together, so
// that a run does not fail at its first save. Pinned memory is already allocated.
void check_snapshot(const HostMemory& host, const MemoryPlan& plan, int64_t available);

// The same for the rows of experts beyond their budget, so that a run that starts can hold any routing.
void check_spill(const HostMemory& host, const MemoryPlan& plan, int64_t available);

}  // namespace moebius

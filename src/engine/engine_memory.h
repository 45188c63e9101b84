// The check that an engine's memory is available, and the measurement of how much of it was used.
#pragma once

#include "comm/gpu/gpu_ranks.h"
#include "device/accelerator.h"
#include "engine/device_memory.h"
#include "engine/engine_spec.h"

namespace moebius {

MemoryUse memory_use(const EngineSpec& spec);
// Returns whether a training step loads kernels of cuDNN, which use GPU memory.
bool runs_cudnn(const EngineSpec& spec);
// Error{usage} with the plan's table when the host or the GPU does not have the planned memory.
// Ranks that share a GPU compare the sum of their plans, before any of them has allocated. gpu,
// ranks: null if there are none.
void check_memory(MemoryPlan& plan, int64_t stack_bytes, const EngineSpec& spec, const Accelerator* gpu,
                  GpuRanks* ranks);

// Peak memory in bytes. For a GPU it leaves out the CUDA context, NCCL and other programs; on a
// shared GPU it is the sum over its ranks. Without a GPU it is the peak of the process on the host.
class PeakMemory {
 public:
  explicit PeakMemory(const Accelerator* gpu = nullptr);  // counts from the memory in use now
  void sample();                                          // a GPU reports what is in use now, not its peak
  int64_t bytes() const;

 private:
  int64_t in_use() const;
  const Accelerator* gpu_;
  int64_t before_ = 0, peak_ = 0;
};

}  // namespace moebius

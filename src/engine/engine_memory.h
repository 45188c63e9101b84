// The check that an engine's memory is available, and the measurement of its peak.
#pragma once

#include <chrono>

#include "comm/gpu/gpu_ranks.h"
#include "device/accelerator.h"
#include "engine/device_memory.h"
#include "engine/engine_spec.h"

namespace moebius {

MemoryUse memory_use(const EngineSpec& spec);
KeptOnHost kept_on_host(const EngineSpec& spec);
// Returns whether a training step loads kernels of cuDNN, which use GPU memory.
bool runs_cudnn(const EngineSpec& spec);
// Throws Error{usage} with the plan's table when the host or the GPU lacks the planned memory. Ranks that share a GPU,
// or without GPUs a machine, check the sum of their plans before any of them allocates: all ranks of spec.world call it
// together. gpu, ranks: null without GPUs, or with one rank.
void check_memory(MemoryPlan& plan, int64_t stack_bytes, const EngineSpec& spec, const Accelerator* gpu,
                  GpuRanks* ranks);

// Peak memory in bytes. Of a GPU: without the CUDA context, NCCL and other programs; on a shared GPU, the sum over its
// ranks. Without a GPU: the peak resident set size of the process.
class PeakMemory {
 public:
  explicit PeakMemory(const Accelerator* gpu = nullptr);  // memory in use now does not count
  void sample();                                          // needed since a GPU reports its current use, not its peak
  int64_t bytes() const;

 private:
  int64_t in_use() const;
  const Accelerator* gpu_;
  int64_t before_ = 0, peak_ = 0;
};

// Returns free pages inside the heap to the system. oneDNN allocates and frees blocks that are aligned to pages for
// every product, and glibc 2.36 seldom uses the gaps between them again, so a run would waste a few MiB.
class HeapGaps {
 public:
  // A call takes 0.1 to 0.2 ms. Calls within 0.1 s of the last one that worked do nothing.
  void close();

 private:
  std::chrono::steady_clock::time_point next_{};
};

}  // namespace moebius

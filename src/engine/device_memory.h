// The memory of a GPU that a run holds beside its CUDA context. It is known before any of it is
// allocated: the plan, and the memory that is not part of the plan.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "config/model_spec.h"
#include "config/policy_spec.h"
#include "memory/plan.h"

namespace moebius {

struct DeviceMemory {
  int64_t plan_bytes = 0;       // one allocation per life, in whole pages of the GPU
  int64_t workspace_bytes = 0;  // workspaces of matrix products, and memory to try their algorithms
  int64_t code_bytes = 0;       // code of kernels, which are loaded at their first use, and CUDA graphs
  int64_t num_ranks = 1;        // ranks that share the GPU; the bytes are the sums over them
  int64_t total_bytes() const { return plan_bytes + workspace_bytes + code_bytes; }
  // The sum for ranks that share a GPU, when each holds as much as this one, in a process of its own.
  DeviceMemory times(int64_t ranks) const;
  // Example: "predicted peak on the GPU 1.23 GiB (plan ..., workspaces ..., kernels ...)". If ranks
  // share the GPU, the text gives their number, and says that their contexts are not in the sum.
  std::string text() const;
};

// The memory of a plan of so many bytes a life. with_cudnn: kernels of cuDNN run, too.
DeviceMemory device_memory(const std::array<int64_t, kNumLives>& life_bytes, bool with_cudnn);
// The memory of a plan whose step stack has stack_bytes. with_cudnn: kernels of cuDNN run, too.
DeviceMemory device_memory(const MemoryPlan& plan, int64_t stack_bytes, bool with_cudnn = false);

// The bytes reserved for code_bytes and for other memory that is allocated at first use.
// No run has used that much so far. The margin exists because a full GPU fails in the middle
// of a step.
constexpr int64_t kDeviceReserveBytes = int64_t{384} << 20;

// The sum of the plan, the workspaces and kDeviceReserveBytes.
int64_t needed_bytes(const MemoryPlan& plan, int64_t stack_bytes);

// The settings of a run that decide what would help when its plan does not fit.
struct MemoryUse {
  ModelSpec model;
  bool training = false;
  int64_t batch = 1;  // sequences of a micro-batch
  RecomputeSpec recompute;
  bool freezes = false, has_adapters = false;
};
// Returns advice that names only settings that the run does not use yet. available: bytes, or
// INT64_MAX where the number is not known.
std::string memory_advice(const MemoryUse& use, const MemoryPlan& plan, int64_t available);

// Error{usage} with advice and the plan's table when less is available than needed. The check runs
// before any allocation. Otherwise a system would promise memory that it does not have, and end the
// process when it is used; a GPU would fail in the middle of a plan.
void check_host_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t available, const MemoryUse& use);
// The same for the memory of the host that the plan pins for a GPU, beside what other ranks of the machine pin.
void check_pinned_memory(const MemoryPlan& plan, int64_t available, int64_t by_others = 0);
void check_device_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t free_bytes, const MemoryUse& use);

}  // namespace moebius

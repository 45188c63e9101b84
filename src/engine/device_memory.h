// The memory of a GPU that a run holds beside its CUDA context. It is known before any of it is
// allocated: the plan, and the memory that is not part of the plan.
#pragma once

#include <cstdint>
#include <string>

#include "config/model_spec.h"
#include "config/policy_spec.h"
#include "memory/plan.h"

namespace moebius {

struct DeviceMemory {
  int64_t plan_bytes = 0;       // an allocation a life, in whole pages of the GPU
  int64_t workspace_bytes = 0;  // of matrix products, and for trying their algorithms
  int64_t code_bytes = 0;       // of kernels, which come with their first use, and of CUDA graphs
  int64_t num_ranks = 1;        // that share the GPU; the bytes are the sums over them
  int64_t total_bytes() const { return plan_bytes + workspace_bytes + code_bytes; }
  // The sum over ranks that share a GPU and each hold as much as this one, in processes of their own.
  DeviceMemory times(int64_t ranks) const;
  // "predicted peak on the GPU 1.23 GiB (plan ..., workspaces ..., kernels ...)". If ranks share the GPU, it says how
  // many they are, and that their contexts are not in the sum.
  std::string text() const;
};

// The memory of a plan whose step stack has stack_bytes. with_cudnn: kernels of cuDNN run, too.
DeviceMemory device_memory(const MemoryPlan& plan, int64_t stack_bytes, bool with_cudnn = false);

// Set aside for code_bytes and other memory that comes with use. It is more than any run was seen to take, since a GPU
// that is full fails in the middle of a step.
constexpr int64_t kDeviceReserveBytes = int64_t{384} << 20;

// The sum of the plan, the workspaces and kDeviceReserveBytes.
int64_t needed_bytes(const MemoryPlan& plan, int64_t stack_bytes);

// The settings of a run that decide what would help when its plan does not fit.
struct MemoryUse {
  ModelSpec model;
  bool training = false;
  int64_t batch = 1;  // sequences of a micro-batch
  RecomputeSpec recompute;
  bool freezes = false;
};
// Advice that names only what the run does not do yet. available: INT64_MAX where it is not known.
std::string memory_advice(const MemoryUse& use, const MemoryPlan& plan, int64_t available);

// Error{usage} with advice and the plan's table when less is available than needed. A system promises memory that it
// does not have and ends the process when it is used, and a GPU fails in the middle of a plan: so this comes first.
void check_host_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t available, const MemoryUse& use);
void check_device_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t free_bytes, const MemoryUse& use);

}  // namespace moebius

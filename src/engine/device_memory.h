// What a run holds of a GPU beside its context, known before any of it is
// allocated: the plan, and what stands beside it.
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

// Of a plan whose step stack takes so much. with_cudnn: cuDNN's kernels are among those that run.
DeviceMemory device_memory(const MemoryPlan& plan, int64_t stack_bytes, bool with_cudnn = false);

// What is set aside for code_bytes and what else comes with use: more than any run was seen to take, since a GPU that
// is full fails in the middle of a step.
constexpr int64_t kDeviceReserveBytes = int64_t{384} << 20;

// Of the plan, the workspaces and what is set aside.
int64_t needed_bytes(const MemoryPlan& plan, int64_t stack_bytes);

// What would help a run whose plan does not fit, of what it does not do yet.
struct MemoryUse {
  ModelSpec model;
  bool training = false;
  int64_t batch = 1;  // sequences of a micro-batch
  RecomputeSpec recompute;
  bool freezes = false;
};
// available: INT64_MAX where it is not known.
std::string memory_advice(const MemoryUse& use, const MemoryPlan& plan, int64_t available);

// The system promises memory that it does not have, and ends the process when it is used; a GPU fails in the middle of
// the plan: so what is needed is compared with what is available first. Error{usage} with advice and the plan's table.
void check_host_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t available, const MemoryUse& use);
void check_device_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t free_bytes, const MemoryUse& use);

}  // namespace moebius

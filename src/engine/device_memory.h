// The prediction of the GPU memory of a run, without its CUDA context: the plan, and the memory outside of the plan.
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
  int64_t workspace_bytes = 0;  // cuBLASLt's workspaces, and memory to time its algorithms
  int64_t code_bytes = 0;       // code of kernels, which is loaded at first use, and CUDA graphs
  int64_t num_ranks = 1;        // ranks that share the GPU; the bytes are sums over them
  int64_t total_bytes() const { return plan_bytes + workspace_bytes + code_bytes; }
  // Returns the sum over ranks that share a GPU, if each needs as much as this one, in a process of its own.
  DeviceMemory times(int64_t ranks) const;
  // Returns "predicted peak on the GPU 1.23 GiB (plan ..., workspaces ..., kernels ...)". If ranks share the GPU, the
  // text has their number, and says that their contexts are not included.
  std::string text() const;
};

// Predicts the memory of a plan with these bytes for each life. with_cudnn: kernels of cuDNN are used.
DeviceMemory device_memory(const std::array<int64_t, kNumLives>& life_bytes, bool with_cudnn);
// Predicts the memory of a plan with a step stack of stack_bytes.
DeviceMemory device_memory(const MemoryPlan& plan, int64_t stack_bytes, bool with_cudnn = false);

// Bytes reserved for code_bytes and other allocations at first use, with a margin: a GPU that is full fails in the
// middle of a step.
constexpr int64_t kDeviceReserveBytes = int64_t{384} << 20;

// Returns the sum of the plan, the workspaces and kDeviceReserveBytes.
int64_t needed_bytes(const MemoryPlan& plan, int64_t stack_bytes);

// The settings of a run by which memory_advice() decides what would help when the plan does not fit.
struct MemoryUse {
  ModelSpec model;
  bool training = false;
  int64_t batch = 1;  // sequences of a micro-batch
  RecomputeSpec recompute;
  bool freezes = false, has_adapters = false;
};
// Returns advice on settings that the run does not use yet. available: bytes, or INT64_MAX if unknown.
std::string memory_advice(const MemoryUse& use, const MemoryPlan& plan, int64_t available);

// Throws Error{usage} with advice and the plan's table when less memory is available than needed. It is called before
// any allocation, since Linux overcommits memory and would kill the process later, and a GPU would fail in the middle
// of the allocations. by_others: bytes that other ranks of the machine need.
void check_host_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t available, const MemoryUse& use,
                       int64_t by_others = 0);
// Returns the bytes that check_host_memory() compares with those available.
int64_t needed_host_bytes(const MemoryPlan& plan, int64_t stack_bytes);
// The keys by which a plan has more than activations in host memory, for messages.
struct KeptOnHost {
  bool states = true;    // optimizer.offload
  bool weights = false;  // "weights" in memory.offload
};
// The same for the host memory that the plan pins for a GPU. by_others: bytes that other ranks of the machine pin.
void check_pinned_memory(const MemoryPlan& plan, int64_t available, int64_t by_others = 0, const KeptOnHost& kept = {});
void check_device_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t free_bytes, const MemoryUse& use);

}  // namespace moebius

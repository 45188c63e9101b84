// Kernels that ops launch.
#pragma once

#include <cstdint>
#include <string>

namespace moebius {

struct LaunchesOfPass {
  // The pass stores gradients of expert weights with Hopper's bf16 kernel, so another one clears those of experts
  // without rows. Products that add to gradients have none to clear, and other kernels write all of them.
  bool clears_experts = false;
  // RoPE normalises q and k, and its backward pass sums the gradients of both weights.
  bool norms_in_rope = false;
  // The router has a bias, whose gradient is summed over the tokens.
  bool biases_router = false;
};

// Returns the kernels that one call of an op of Moebius launches on a GPU in training, by the op's name in traces.
// Memory that is cleared on the GPU counts as a kernel. The loss counts as one chunk of rows; with more chunks,
// products take much longer than a launch. Likewise attention, whose backward pass counts as one slice.
int64_t launches_of(const std::string& op, const LaunchesOfPass& pass);

}  // namespace moebius

// Kernels that ops launch.
#pragma once

#include <cstdint>
#include <string>

namespace moebius {

// Returns the kernels that one call of an op of Moebius launches on a GPU in training, by the op's name in traces.
// Memory that is cleared on the GPU counts as a kernel. The loss has one part of its rows; more parts have products that
// are long beside a launch. So has attention, whose backward pass has one slice.
// clears_experts: the pass stores gradients of expert weights with Hopper's bf16 kernel, so another one clears those of
// experts without rows. Products that add to gradients have none to clear, and other kernels write all of them.
int64_t launches_of(const std::string& op, bool clears_experts);

}  // namespace moebius

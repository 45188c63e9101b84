// Kernels that ops launch.
#pragma once

#include <cstdint>
#include <string>

namespace moebius {

// Returns the kernels that one call of an op of Moebius launches on a GPU in training, by the op's name in traces. The
// loss has one part of its rows; more parts have products that are long beside a launch.
int64_t kernels_of(const std::string& op);

}  // namespace moebius

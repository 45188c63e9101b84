// A name that no two GPUs share. Ranks on different machines, or in different
// containers, compare it.
#pragma once

#include <string>

namespace moebius {

std::string gpu_identity(int index);              // REQUIRES: index < Accelerator::count()
std::string gpu_identity_of(const void* memory);  // of the GPU that has this memory

}  // namespace moebius

// A globally unique name of a GPU, by which ranks on different machines, or in different containers, find out whether
// they share one.
#pragma once

#include <string>

namespace moebius {

std::string gpu_identity(int index);              // REQUIRES: index < Accelerator::count()
std::string gpu_identity_of(const void* memory);  // the identity of the GPU that has this memory

}  // namespace moebius

// A name that no two GPUs have: what ranks on different machines, or in different containers, compare.
#pragma once

#include <string>

namespace moebius {

std::string gpu_identity(int index);  // REQUIRES: index < Accelerator::count()

}  // namespace moebius

// How the step is computed without changing what is computed: precision, recompute, offload.
#pragma once

#include <string>
#include <vector>

#include "core/dtype.h"

namespace moebius {

struct PrecisionSpec {
  DType compute = DType::bf16;  // f32 | bf16; master weights, gradients and optimizer state are f32
  bool operator==(const PrecisionSpec&) const = default;
};

struct MemorySpec {
  std::vector<std::string> recompute;  // none known yet: any name is an error
  std::vector<std::string> offload;
  bool operator==(const MemorySpec&) const = default;
};

}  // namespace moebius

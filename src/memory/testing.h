// Plans for tests.
#pragma once

#include "memory/plan.h"
#include "memory/saved_tensor.h"

namespace moebius {

// The plan of one layer, whose activations of 8 MiB memory.offload keeps on the host.
struct OffloadedPlan {
  OffloadedPlan() : plan({}, {.tensors = {.qkv = true}}) {
    plan.offload_to(&layer);
    qkv.declare(plan, "qkv", {(8 << 20) / 4}, DType::f32, &RecomputeSpec::qkv);
    plan.offload_to(nullptr);
  }
  MemoryPlan plan;
  OffloadedLayer layer;
  SavedTensor qkv;
};

}  // namespace moebius

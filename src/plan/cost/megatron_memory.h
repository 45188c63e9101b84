// The bytes that a rank of Megatron Core holds and one of Moebius does not.
#pragma once

#include <vector>

#include "plan/layout.h"
#include "plan/work_time.h"

namespace moebius {

// Megatron Core allocates what a pass saves when it runs, so its stages share the memory of their peaks. The merged
// schedule has one more micro-batch in flight, whose forward pass overlaps with a backward pass.
// Returns the sets of each virtual stage that are in flight at the peak.
std::vector<int64_t> sets_of_megatron(const TimeContext& c, const PipelineUse& use);

// Returns the bytes that Megatron Core saves in addition to those of Moebius, for each layer and micro-batch in flight
// (arXiv 2603.07685). For an MoE layer these are the rows of its experts, which Moebius dispatches again, and the
// activation's output, which Moebius recomputes; both are in 8 bits if products are. A plain permutation also saves the
// experts' outputs. Latent attention saves the rotated part of keys once for each head.
// REQUIRES: use.num_saved is sets_of_megatron().
int64_t beside_of_megatron(const TimeContext& c, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank);

}  // namespace moebius

// The memory that a rank of Megatron Core needs in addition to that of a rank of Moebius.
#pragma once

#include <vector>

#include "plan/layout.h"
#include "plan/work_time.h"

namespace moebius {

// Megatron Core allocates what a pass saves when it runs, so its stages share the memory of their peaks. The merged
// schedule has one more micro-batch in flight, whose forward pass overlaps with a backward pass.
// Returns, for each virtual stage, the sets of saved tensors that are in flight at this peak.
std::vector<int64_t> megatron_sets_in_flight(const TimeContext& c, const PipelineUse& use);

// Returns the bytes that Megatron Core saves in addition to those of Moebius, for each layer and micro-batch in flight
// (arXiv 2603.07685). For an MoE layer these are the rows of its experts, which Moebius dispatches again, and the
// activation's output, which Moebius recomputes; both are in 8 bits if products are. A plain permutation also saves the
// experts' outputs. Latent attention saves the rotated part of keys once for each head.
// REQUIRES: use.num_saved is megatron_sets_in_flight().
int64_t megatron_extra_bytes(const TimeContext& c, const StageLayout& layout, const PipelineUse& use, int64_t pp_rank);

}  // namespace moebius

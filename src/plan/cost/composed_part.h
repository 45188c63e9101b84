// A part whose times are computed from three simpler parts, without a dry run.
//
// Attention depends on cp, its method and the length of sequences; the experts depend on ep, etp and the dispatcher. A
// search times every pair of both. They have only the tokens of the rank in common. So a pair takes the time of its
// experts with simple attention, plus that of its attention with local experts, minus that of simple attention with
// local experts. The number of dry runs is then the sum of both numbers of choices, not their product.
#pragma once

#include <memory>

#include "plan/part.h"

namespace moebius {

// Returns whether a part is composed. It is run itself without context parallelism, without experts on other ranks, and
// with memory.offload.
bool has_simpler_parts(const EngineSpec& spec, const StageSpec& stage);
// Returns the spec with the same number of tokens per rank, in short sequences that are not split over ranks.
EngineSpec with_simple_attention(EngineSpec spec);
EngineSpec with_local_experts(EngineSpec spec);

// Returns the composed part. It has the parameters of `of.experts`.
std::unique_ptr<PartWork> composed_part(const SimplerParts& of);

}  // namespace moebius

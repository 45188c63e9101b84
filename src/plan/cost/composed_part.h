// A part whose attention and experts are known from simpler parts.
//
// Attention depends on cp, its exchange and the length of sequences, and the experts on ep, etp and the dispatcher. A
// search times every pair of both. Both see the same tokens of a rank, and nothing else of each other. So a pair takes
// the time of a part with its experts and simple attention, and of one with its attention and local experts, without
// that of a part with both simple. As many parts are run as there are of each, and not pairs.
#pragma once

#include <memory>

#include "plan/part.h"

namespace moebius {

// False where a part is run itself: without context parallelism, without experts on other ranks, or where activations
// are on the host.
bool has_simpler_parts(const EngineSpec& spec, const StageSpec& stage);
// Returns the spec with as many tokens of a rank, in short sequences that no other rank has a part of.
EngineSpec with_simple_attention(EngineSpec spec);
EngineSpec with_local_experts(EngineSpec spec);

// The part, with the parameters of `experts`.
std::unique_ptr<PartWork> composed_part(const SimplerParts& of);

}  // namespace moebius

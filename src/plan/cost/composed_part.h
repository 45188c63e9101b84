// A part whose attention and experts are known from simpler parts.
//
// With several ranks of context parallelism, what attention computes and sends depends on their exchange, and what the
// experts do depends on ep, etp and the dispatcher. A search times every pair of both. The ops and calls of a pair are
// those with the experts of the pair and a simple exchange, and those with its exchange and local experts, without
// those with both simple. So as many parts are run as there are exchanges and layouts of experts, and not pairs.
#pragma once

#include <memory>
#include <optional>

#include "plan/part.h"

namespace moebius {

struct SimplerSpecs {
  EngineSpec experts;    // those of the part, with all-gather between the ranks of cp
  EngineSpec attention;  // that of the part, with all experts on each rank
  EngineSpec neither;    // both simple
};
// None where the part is run itself: without such ranks, without experts, or where activations are on the host.
std::optional<SimplerSpecs> simpler_specs(const EngineSpec& spec, const StageSpec& stage);

struct SimplerParts {
  const PartWork &experts, &attention, &neither;
};
// The passes and parameters of the part, with all else of `experts`. Null where they do not add up.
std::unique_ptr<PartWork> composed_part(const SimplerParts& of);

}  // namespace moebius

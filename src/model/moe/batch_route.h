// Routing choices that look at every token of a micro-batch (capacity, Sinkhorn, forced balance),
// where its rows are spread over several ranks of tp x cp. Each rank gets the logits of all tokens,
// in the order of the tokens. It routes the whole micro-batch as one rank would, and keeps the part
// that concerns its rows. The bits are the same on every layout, at the cost of E floats a token.
#pragma once

#include "comm/mesh.h"
#include "model/step.h"
#include "ops/routing/routing.h"

namespace moebius {

// Returns whether a rule needs more than the logits of the token itself.
bool looks_at_batch(const RouteRule& rule);

// route_fwd for the rows here, which are a block of the micro-batch `shape`
// (model/attention/token_runs.h). The rule is that of the whole micro-batch. load and dropped get
// the counts of the whole micro-batch on one of its ranks, and nothing on the others. The scratch
// of `here` is not used.
void route_batch(Step& step, const RouteFwd& here, const BatchShape& shape, const Mesh& mesh);

}  // namespace moebius

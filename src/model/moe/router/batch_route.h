// Routing rules that depend on all tokens of a micro-batch (capacity, Sinkhorn, forced balance), if its rows are spread
// over several ranks of tp x cp. Each rank gathers the logits of all tokens, in their order, routes the whole
// micro-batch as one rank would, and keeps the part for its rows. So the bits are the same on every layout; the gather
// costs E floats per token.
#pragma once

#include "comm/mesh.h"
#include "model/step.h"
#include "ops/routing/routing.h"

namespace moebius {

// Returns whether the route of a token depends on the logits of other tokens.
bool depends_on_batch(const RouteRule& rule);

// Runs route_fwd for this rank's rows of a micro-batch `shape` (model/attention/token_runs.h). here.rule is that of the
// whole micro-batch. One rank adds the counts of the whole micro-batch to load and dropped, and the others add nothing.
// here.scratch is not used.
void route_batch(Step& step, const RouteFwd& here, const BatchShape& shape, const Mesh& mesh);

}  // namespace moebius

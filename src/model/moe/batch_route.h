// Choices that look at every token of a micro-batch (capacity, Sinkhorn, forced balance) where its rows lie on several
// ranks of tp x cp: each of them gets the logits of all, in the order of the tokens, routes the whole micro-batch as
// one rank would, and keeps what concerns its rows. The same bits on every layout, for the price of E floats a token.
#pragma once

#include "comm/mesh.h"
#include "model/step.h"
#include "ops/routing/routing.h"

namespace moebius {

// Whether a rule asks for more than the logits of the token itself.
bool looks_at_batch(const RouteRule& rule);

// route_fwd of the rows here, a block of the micro-batch `shape` as model/attention/token_runs.h says; rule: of the whole
// micro-batch. load and dropped get what concerns the whole micro-batch on one of its ranks, nothing on the others.
// Scratch of `here` is not used.
void route_batch(Step& step, const RouteFwd& here, const BatchShape& shape, const Mesh& mesh);

}  // namespace moebius

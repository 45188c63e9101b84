// The logits of the router for few rows, as when text is generated.
#pragma once

#include "ops/routing/routing.h"

namespace moebius {

// router_logits_fwd for at most about 32 rows, which no backward pass follows. On a GPU it reads the weights once, and
// the bits of a row depend neither on the other rows nor on their number, but differ from those of router_logits_fwd.
void router_logits_few(Stream& s, const RouterLogitsFwd& a);

}  // namespace moebius

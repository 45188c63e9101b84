// Experts of few rows, as when text is generated. Their time is then that of reading the weights.
#pragma once

#include "ops/experts/experts.h"
#include "ops/routing/routing.h"

namespace moebius {

// expert_down after an expert_up of the same rows. The results are those of expert_down. With few_rows a Hopper GPU
// reads w2 while expert_up runs; without few_rows, and on other devices, this is expert_down. REQUIRES: expert_up ran
// before on the stream with these offsets, and nothing has written the offsets or w2 since expert_up was called.
void expert_down_after_up(Stream& s, const ExpertDown& a);

// route_fwd, and then expert_up of its rows, with the results of both. For at most 4 tokens, 32 rows and 128 experts a
// Hopper GPU needs one kernel for both.
void expert_up_of_route(Stream& s, const RouteFwd& route, const ExpertUp& a);
// expert_down_after_up of the rows of this route. REQUIRES: expert_up_of_route ran before with it, and nothing has written
// the logits, the bias of the choice or w2 since it was called.
void expert_down_of_route(Stream& s, const RouteFwd& route, const ExpertDown& a);

}  // namespace moebius

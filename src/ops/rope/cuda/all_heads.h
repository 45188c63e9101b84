// rope_fwd and rope_bwd with norms over all heads of q together, and over all of k.
#pragma once

#include "device/device.h"
#include "ops/rope/rope.h"

namespace moebius::cuda {

// REQUIRES: has_norms_of_all_heads(a).
void rope_all_heads_fwd(Stream& s, const RopeFwd& a);
void rope_all_heads_bwd(Stream& s, const RopeBwd& a);

}  // namespace moebius::cuda

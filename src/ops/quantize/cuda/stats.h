// Computes Quantize::stats_5 on a GPU.
#pragma once

#include "ops/quantize/quantize.h"

namespace moebius::cuda::quantize_tile {

// Adds to a.stats_5, once a.q is quantised. Counts are integers, and no order changes these or the range of the scales.
void add_stats(Stream& s, const Quantize& a);

}  // namespace moebius::cuda::quantize_tile

// Computes Quantize::stats_5: saturated elements, elements that became zero, and the range of the scales.
#pragma once

#include "ops/quantize/quantize.h"

namespace moebius::cpu {

// Adds to a.stats_5, once a.q is quantised. The counts are integers, so that no order changes them.
void add_stats(Stream& s, const Quantize& a);

}  // namespace moebius::cpu

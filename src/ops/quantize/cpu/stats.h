// The figures of Quantize say what it did to the numbers of a matrix.
#pragma once

#include "ops/quantize/quantize.h"

namespace moebius::cpu {

// Adds to a.figures_5, once a.q is quantised. The counts are integers, so that no order changes them.
void add_figures(Stream& s, const Quantize& a);

}  // namespace moebius::cpu

// The multiprocessors of a GPU that a product uses.
#pragma once

#include "plan/work_time.h"

namespace moebius {

// Returns how many times longer than on all multiprocessors one call of an op takes on those that it uses; at least 1.
// A block computes a tile, and few tiles leave multiprocessors idle, with their parts of the rates of arithmetic and of
// memory. `cost` is that of one call, for the rows in use. The result is 1 on a CPU and for ops other than products.
// Tiles follow from the cost alone, so this is a lower bound: a block computes at least 128 x 128 sums of 128 terms
// (products of few tiles may split K, docs/design/determinism.md), or moves the bytes of as many. Hopper's blocks of
// rows of experts and of gated layers compute 128 x 256.
// In gradients of expert weights a block sums all rows of an expert for a tile of 128 x 256 weights
// (ops/experts/sm90/expert_wgrad.cu). So there is a tile for each 128 x 256 weights.
double idle_multiprocessors(const TimeContext& c, const OpWork& op, const Cost& cost);

}  // namespace moebius

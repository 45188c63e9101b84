// The bytes that Megatron Core's own kernels move for the rows of experts, besides the products that Moebius has too.
#pragma once

#include "plan/work_time.h"

namespace moebius {

// Returns the bytes for one MoE layer and micro-batch in one pass. Rows are permuted and unpermuted by separate
// kernels, which Moebius fuses into its products, and the activation reads and writes them again.
double permuted_bytes(const TimeContext& c);

// The bytes for one MoE layer and micro-batch of experts with biases (gpt-oss); zeros for others.
struct BiasedBytes {
  double forward = 0, backward = 0;
  double activation = 0;  // the part of `forward` that --assume recompute=activation repeats
};
// Megatron Core clamps the two halves of the pre-activations and joins them again, in an op each. It adds the biases of
// the second products, times the routing weights, expert by expert, and joins the results. Source: TEGroupedMLP and
// weighted_bias_quick_geglu_impl of Megatron Core. Routing weights are taken to be in bf16.
BiasedBytes biased_bytes(const TimeContext& c);

}  // namespace moebius

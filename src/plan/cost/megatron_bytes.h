// The work of Megatron Core's experts besides the products that Moebius has too: the bytes that its own kernels move,
// and the launches of the host.
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

// Bytes of reads and writes for one logit in Megatron Core, which keeps the logits of a micro-batch in bf16: the
// products write and read them, and the loss passes over them. Transformer Engine's loss reads them twice, writes
// gradients in their place and scales these. The "native" loss has kernels in f32: it converts the logits and finds
// the largest, subtracts that and takes exponentials, divides by their sum, and computes the gradients in bf16.
inline constexpr double kLogitBytesOfProducts = 2 + 2 + 2;
inline constexpr double kLogitBytesOfLoss = 2 + (2 + 2) + (2 + 2), kLogitBytesOfNativeLoss = (2 + 4) + 8 + 8 + (4 + 2);

// The bytes for one layer and micro-batch of rotating q and k by ops of their own; zeros where Megatron Core's kernel
// does so. That kernel cannot scale cosines and sines, which YaRN needs (apply_rotary_pos_emb in Megatron Core). Latent
// attention has a kernel of its own for that.
struct RopeBytes {
  double forward = 0, backward = 0;
};
RopeBytes rope_bytes(const TimeContext& c);

// Adds the time of these reads and writes to a part of Megatron Core's step. is_layer: the part is a layer, which
// has RoPE.
void add_unfused(PartTime& t, const TimeContext& c, const PartWork& part, bool is_layer);

// Seconds in which the host makes and launches one op of an expert. It is a round number that is assumed
// (docs/measurements/plan.md compares it with runs).
inline constexpr double kExpertOpSeconds = 10e-6;

// Returns the ops of one expert in a pass. Each of its two linear layers is one product in the forward pass and two in
// the backward pass. In 8 bits or less the operands are quantised expert by expert, with their transposes: the input
// and the weight in the forward pass, and the gradient in the backward pass. A scale of a whole tensor needs the
// largest magnitude, the scale and then the values. MXFP8 and NVFP4 bring the scales of both operands into another
// order for each product.
int64_t expert_ops(PlanPrecision precision, bool backward);

// Seconds in which the host makes and launches all other ops of an MoE layer, in a forward and a backward pass without
// CUDA graphs, and what merged passes add to that: their host interleaves the parts of two micro-batches. Both are
// round numbers that are assumed (docs/measurements/plan.md compares them with runs).
inline constexpr double kLayerSeconds = 7e-3, kMergedSeconds = 2.5e-3;

// Adds to t.backward.host the time by which the host's launches of num_moe layers exceed both passes. graphs: the share
// of the layer's own ops that is launched one by one, 1 without CUDA graphs.
void add_layer_launches(PartTime& t, const TimeContext& c, int64_t num_moe, double graphs);

// Adds to t.forward.host and t.backward.host the time in which the GPU waits for these launches. The host has read the
// counts of rows before them, so none of them was launched ahead. They overlap with the experts' own kernels.
// repeats: the backward pass computes the experts' forward pass again.
void add_expert_launches(PartTime& t, const TimeContext& c, int64_t num_moe, bool repeats);

}  // namespace moebius

#include "plan/cost/megatron_bytes.h"

#include <algorithm>

#include "model/attention/rope_frequencies.h"
#include "plan/cost/row_exchange.h"

namespace moebius {
namespace {

constexpr double kBf16 = 2;

// The rows of experts on an average rank, one for each token and expert of it.
double rows_of(const TimeContext& c) {
  return static_cast<double>(rows_between_projections(c.spec.shape, c.spec.mesh) * c.spec.model.top_k);
}

constexpr int64_t kLinears = 2;

// Ops that quantise one operand, and those that reorder the scales of a product's two operands.
struct QuantizerOps {
  int64_t operand = 0, product = 0;
};

QuantizerOps quantizer_ops(PlanPrecision precision) {
  switch (precision) {
    case PlanPrecision::from_recipe:
      return {};
    case PlanPrecision::fp8_block:
      return {.operand = 1};
    case PlanPrecision::fp8_tensor:
      return {.operand = 3};
    case PlanPrecision::mxfp8:
      return {.operand = 1, .product = 2};
    case PlanPrecision::nvfp4:
      return {.operand = 3, .product = 2};
  }
  MOEBIUS_FAIL(internal, "expert_ops: a precision that is not known");
}

}  // namespace

double permuted_bytes(const TimeContext& c) {
  const ModelSpec& m = c.spec.model;
  const double T = static_cast<double>(rows_between_projections(c.spec.shape, c.spec.mesh));
  const double R = rows_of(c), D = static_cast<double>(m.hidden_size);
  const double F = static_cast<double>(m.moe_intermediate_size);
  const double permute = c.assume.permutation == PlanPermutation::fused ? 0 : 2 * (T + R) * D;
  const double sort = dispatcher_of(c) == PlanDispatcher::alltoall ? 4 * R * D : 0;
  return kBf16 * (permute + sort + 3 * R * F);
}

BiasedBytes biased_bytes(const TimeContext& c) {
  const ModelSpec& m = c.spec.model;
  if (!m.expert_proj_bias) return {};
  const double R = rows_of(c), D = static_cast<double>(m.hidden_size);
  const double F = m.swiglu_limit > 0 ? static_cast<double>(m.moe_intermediate_size) : 0;
  // Forward: each of the halves, of F columns, is read and written, and then both are joined: read and written again.
  const double clamp = 2 * 2 * F + 2 * 2 * F;
  // Backward: each half of the gradient and of the input is read, its gradient written, and then both joined.
  const double clamp_backward = 2 * 3 * F + 2 * 2 * F;
  // Forward: bias times weight is written; that and the product are read, and the sum written; the sums are joined.
  const double bias = 1 * D + 3 * D + 2 * D;
  // Backward: the gradients of the parts are joined. Those of the bias and of the weight are products that are written
  // and summed: read, written and read again, each.
  const double bias_backward = 2 * D + 2 * 3 * D;
  return {.forward = kBf16 * R * (clamp + bias),
          .backward = kBf16 * R * (clamp_backward + bias_backward),
          .activation = kBf16 * R * clamp};
}

RopeBytes rope_bytes(const TimeContext& c) {
  const ModelSpec& m = c.spec.model;
  if (!c.machine.is_gpu || m.is_latent() || rope_frequencies(m).magnitude == 1) return {};
  const double columns = static_cast<double>((m.num_heads + m.num_kv_heads) * m.head_dim / c.spec.mesh.tp);
  // Forward: half is negated and joined with the other half, two products, their sum, and a copy. Backward: two
  // products, the negation and the joining, the sum, and the gradient of a slice. The 2 that are subtracted are the
  // read and the write that any kernel for RoPE has; they are counted as an op.
  const double forward = (1 + 2) + 2 * 2 + 3 + 2 - 2, backward = 2 * 2 + 1 + 2 + 3 + 3 - 2;
  const double elements = static_cast<double>(c.spec.shape.tokens()) * columns;
  return {.forward = kBf16 * forward * elements, .backward = kBf16 * backward * elements};
}

namespace {

// Returns the logits of an op that computes the loss and its gradients.
double logits_of(const OpWork& op, double hidden) {
  if (op.name == "lm_loss") return op.cost.flops / (6 * hidden);
  return op.name == "lm_loss_block" ? op.cost.flops / (4 * hidden) : 0;
}

}  // namespace

void add_unfused(PartTime& t, const TimeContext& c, const PartWork& part, bool is_layer) {
  const auto add = [&](PassTime& pass, double bytes) {
    pass.kernels[static_cast<size_t>(KernelClass::memory)] += bytes / memory_rate(c);
  };
  if (is_layer) {
    const RopeBytes rope = rope_bytes(c);
    const bool repeats = part.recompute.layer || part.recompute.covers(&RecomputeSpec::qkv);
    add(t.forward, rope.forward);
    add(t.backward, rope.backward + (repeats ? rope.forward : 0));
  }
  double logits = 0;
  for (const OpWork& op : (part.simpler.neither ? *part.simpler.neither : part).loss.ops)
    logits += logits_of(op, static_cast<double>(c.spec.model.hidden_size));
  const double of_loss = c.assume.cross_entropy == PlanLoss::native ? kLogitBytesOfNativeLoss : kLogitBytesOfLoss;
  add(t.loss, (kLogitBytesOfProducts + of_loss) * logits);
}

int64_t expert_ops(PlanPrecision precision, bool backward) {
  const QuantizerOps ops = quantizer_ops(precision);
  const int64_t operands = backward ? 1 : 2, products = backward ? 2 : 1;
  return kLinears * (operands * ops.operand + products * (1 + ops.product));
}

void add_layer_launches(PartTime& t, const TimeContext& c, int64_t num_moe, double graphs) {
  if (num_moe == 0 || graphs == 0) return;
  const PlanPrecision precision = products_precision(c.spec, c.assume, c.machine);
  const double ops = static_cast<double>(c.spec.model.num_experts / c.spec.mesh.ep *
                                         (expert_ops(precision, false) + expert_ops(precision, true)));
  const double own = kLayerSeconds + (c.assume.merged_overlap ? kMergedSeconds : 0);
  const double launched = static_cast<double>(num_moe) * (graphs * own + ops * kExpertOpSeconds);
  t.backward.host += std::max(0.0, launched - t.forward.total() - t.loss.total() - t.backward.total());
}

void add_expert_launches(PartTime& t, const TimeContext& c, int64_t num_moe, bool repeats) {
  if (c.assume.graphs == PlanGraphs::full || num_moe == 0) return;
  const PlanPrecision precision = products_precision(c.spec, c.assume, c.machine);
  const double experts = static_cast<double>(num_moe * c.spec.model.num_experts / c.spec.mesh.ep);
  const auto seconds = [&](bool backward) {
    return experts * static_cast<double>(expert_ops(precision, backward)) * kExpertOpSeconds;
  };
  const double forward = seconds(false), backward = seconds(true) + (repeats ? forward : 0);
  // Modules of multi-token prediction run with the loss.
  t.forward.host += std::max(0.0, forward - t.forward.experts - t.loss.experts);
  t.backward.host += std::max(0.0, backward - t.backward.experts);
}

}  // namespace moebius

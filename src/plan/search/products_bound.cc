#include "plan/search/products_bound.h"

#include <algorithm>

#include "model/moe/chunked_experts.h"

namespace moebius {
namespace {

// The share of products in a model's FLOPs without attention. Norms are the rest.
constexpr double kProducts = 0.99;
// The exchanges of an MoE layer and a micro-batch: the rows for experts and their sums, in both passes, and the weights
// and their gradients.
constexpr int64_t kExchanges = 6;

// Returns the highest rate of products in FLOP/s.
double highest_rate(const ProductsBound& b, const Candidate& c) {
  const Shares& shares = b.machine.of(b.assume.system);
  const auto share = [&](Share s) { return shares[static_cast<size_t>(s)]; };
  const bool may_be_low = c.recipe != PrecisionRecipe::none || b.assume.precision != PlanPrecision::from_recipe;
  const double low =
      may_be_low ? std::max(b.machine.fp8_tflops, b.machine.nvfp4_tflops) * share(Share::low_precision) : 0;
  return 1e12 * std::max(low, b.machine.bf16_tflops * std::max(share(Share::products), share(Share::experts)));
}

// Returns the seconds of the copies of a micro-batch.
double copies_seconds(const ProductsBound& b, const ParallelSpec& p, int64_t tokens) {
  const ModelSpec& m = b.run.model;
  const int64_t ranks = p.ep * p.etp, chunk = expert_chunk(tokens, ranks);
  if (p.dispatcher != DispatcherKind::alltoall || p.etp == 1 || chunk * m.top_k < ranks) return 0;
  const int64_t copies = m.num_moe_layers() * (tokens / chunk) * kExchanges * ranks;
  return static_cast<double>(copies) * b.machine.kernel_us * 1e-6;
}

}  // namespace

double products_seconds(const ProductsBound& b, const Candidate& c) {
  const RunSpec& run = b.run;
  const ModelSpec& m = run.model;
  if (!run.train.freeze.empty() || run.lora.is_on() || run.num_mtp() != m.num_mtp_layers) return 0;
  const ParallelSpec& p = c.parallel;
  const int64_t tokens = c.micro_batch * run.train.seq_len / (p.tp * p.cp);
  const double products = kProducts * static_cast<double>(tokens) * m.train_flops_per_token(0) / highest_rate(b, c);
  const double P = static_cast<double>(p.pp), V = static_cast<double>(p.vpp);
  const double M = static_cast<double>(run.train.global_batch / (c.micro_batch * p.dp(b.ranks)));
  return (products + copies_seconds(b, p, tokens)) / P * (M + (P - 1) / V);
}

}  // namespace moebius

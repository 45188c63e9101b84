#include "plan/search/products_bound.h"

#include <algorithm>

#include "model/moe/chunked_experts.h"
#include "plan/work_time.h"

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

// Returns the mean number of keys that a query of a sequence attends to.
double keys_of_query(int64_t seq, int64_t window) {
  const auto S = static_cast<double>(seq), W = static_cast<double>(window);
  return window == 0 || window >= seq ? (S + 1) / 2 : W - W * (W - 1) / (2 * S);
}

// Returns the seconds of attention of all layers for this many tokens, at the rates of kernels that mask nothing in
// vain. With cp the rank that is predicted has less than its share of the keys of a window, so layers with one are
// not counted.
double attention_seconds(const ProductsBound& b, const ParallelSpec& p, int64_t tokens) {
  const ModelSpec& m = b.run.model;
  const HeadWidths widths{m.head_dim, m.is_latent() ? m.v_head_dim : m.head_dim};
  const Shares& shares = b.machine.of(b.assume.system);
  double keys = 0;
  for (int64_t layer = 0; layer < m.num_layers_and_mtp(); ++layer)
    if (p.cp == 1 || m.window_of(layer) == 0) keys += keys_of_query(b.run.train.seq_len, m.window_of(layer));
  const double scores = static_cast<double>(tokens * m.num_heads) * keys;
  const auto seconds = [&](int64_t width, Share share, bool backward) {
    return scores * 2 * static_cast<double>(width) * attention_over_products(b.machine, widths, backward) /
           (1e12 * b.machine.bf16_tflops * shares[static_cast<size_t>(share)]);
  };
  return seconds(widths.qk + widths.v, Share::attention_forward, false) +
         seconds(3 * widths.qk + 2 * widths.v, Share::attention_backward, true);
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
  const double products = kProducts * (static_cast<double>(tokens) * m.train_flops_per_token(0) / highest_rate(b, c) +
                                       attention_seconds(b, p, tokens));
  const double P = static_cast<double>(p.pp), V = static_cast<double>(p.vpp);
  const double M = static_cast<double>(run.train.global_batch / (c.micro_batch * p.dp(b.ranks)));
  const bool fills_bubble = p.schedule == PipelineSchedule::zb_h1;  // as far as the times of its passes allow
  return (products + copies_seconds(b, p, tokens)) / P * (M + (fills_bubble ? 0 : (P - 1) / V));
}

}  // namespace moebius

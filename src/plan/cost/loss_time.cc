#include "plan/cost/loss_time.h"

#include <algorithm>
#include <cmath>

#include "ops/vocab/vocab.h"
#include "plan/cost/critical_path.h"
#include "plan/cost/multiprocessors.h"

namespace moebius {
namespace {

constexpr int64_t kVector = 8;
constexpr double kTile = 128;

// The calls of an op, in chunks of at most C tokens.
struct LossShape {
  double rows = 0, vocab = 0, hidden = 0;  // of a chunk; the rank's part of the vocabulary
  double chunks = 0, element = 0;          // bytes of an element of x
};

struct Product {
  double rows = 0, columns = 0, terms = 0;  // of a chunk
  double bytes = 0;
};

double seconds_of(const TimeContext& c, const OpWork& op, const Product& p, bool is_odd, double rate, double memory) {
  const double flops = 2 * p.rows * p.columns * p.terms;
  const double seconds = std::hypot(flops / rate, p.bytes / memory);
  if (!is_odd) return seconds * idle_multiprocessors(c, op, {.flops = flops, .bytes = p.bytes});
  // No measurement shows that products whose tiles fill the GPU take longer.
  const double tiles = std::ceil(p.rows / kTile) * std::ceil(p.columns / kTile);
  if (tiles >= c.machine.multiprocessors) return seconds;
  const CriticalPath loads{.loads = std::ceil(p.terms / kTermsOfLoad)};
  return seconds * c.machine.multiprocessors / tiles + loads.seconds();
}

}  // namespace

double loss_seconds(const TimeContext& c, const OpWork& op, double rate, double memory) {
  const bool is_logits = op.name == "lm_logits_block", is_block = op.name == "lm_loss_block";
  if (op.name != "lm_loss" && !is_logits && !is_block) return 0;
  if (!c.machine.is_gpu || c.assume.system != PlanSystem::moebius || op.cost.flops <= 0) return 0;
  const ModelSpec& m = c.spec.model;
  const int64_t tokens = c.spec.shape.tokens(), tp = c.spec.mesh.tp;
  const double V = static_cast<double>(div_ceil(m.vocab_size, tp)), D = static_cast<double>(m.hidden_size);
  const double calls = static_cast<double>(op.calls), e = static_cast<double>(size_of(c.spec.precision.compute));
  const double flops = op.cost.flops / calls;
  double chunks = calls, rows = 0, products = is_logits ? 1 : 2;
  if (is_logits || is_block) {
    rows = flops / products / (2 * D * V);
  } else {
    products = std::clamp(std::round(flops / (2 * D * V * static_cast<double>(tokens))), 1.0, 3.0);
    const int64_t chunk = LmLoss::chunk(tokens, m.vocab_size, DeviceKind::cuda);
    rows = flops / products / (2 * D * V) * static_cast<double>(chunk) / static_cast<double>(tokens);
    chunks *= static_cast<double>(tokens) / static_cast<double>(chunk);
  }
  const bool is_odd = c.spec.precision.compute == DType::bf16 && m.vocab_size % (kVector * tp) != 0;
  const auto product = [&](double M, double N, double K, double bytes) {
    return seconds_of(c, op, {.rows = M, .columns = N, .terms = K, .bytes = bytes}, is_odd, rate, memory);
  };
  double seconds = 0;  // of a chunk
  if (!is_block) seconds += product(rows, V, D, e * (rows + V) * D + 4 * rows * V);
  const bool has_gradients = is_block || products > 1;
  if (!is_logits) seconds += (4 + (has_gradients ? e : 0)) * rows * V / memory;
  if (!is_logits && has_gradients) seconds += product(rows, D, V, e * (rows * V + V * D + rows * D));
  if (is_block || products > 2) seconds += product(V, D, rows, e * (rows * V + rows * D) + 8 * V * D);
  return chunks * seconds;
}

}  // namespace moebius

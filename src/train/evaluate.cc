#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "io/data_build.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// Bytes of text per token over the loader's datasets; nothing when one does not say.
std::optional<double> bytes_per_token(const Loader& loader) {
  double bytes = 0, tokens = 0;
  for (int i = 0; i < loader.order().num_datasets(); ++i) {
    const auto info = read_dataset_info(loader.order().dataset(i).prefix());
    if (!info || info->text_bytes == 0) return std::nullopt;
    bytes += static_cast<double>(info->text_bytes);
    tokens += static_cast<double>(info->tokens);
  }
  return bytes / tokens;
}

double take_loss_sum(Engine& engine) {
  const double loss = *engine.model().loss_sum().ptr<double>();
  Stream s = engine.stream();
  fill_zero(s, engine.model().loss_sum());
  return loss;
}

}  // namespace

EvalResult evaluate(Engine& engine, Loader& loader, int64_t max_batches) {
  const int64_t B = engine.spec().shape.batch, T = engine.spec().shape.tokens(), n = loader.num_sequences();
  EvalResult result;
  double loss = 0;
  for (int64_t first = 0, batches = 0; first < n && (max_batches == 0 || batches < max_batches); first += B, ++batches) {
    loader.fill_pass(engine.batch(), first, std::min(B, n - first));
    engine.run([&](Step& step) {
      engine.model().forward_hidden(step, T);
      engine.model().forward_loss(step, false);
    });
    loss += take_loss_sum(engine);
    const float* weight = engine.batch().weight_T.ptr<float>();
    for (int64_t t = 0; t < T; ++t) result.tokens += weight[t];
  }
  if (result.tokens > 0) result.loss = loss / result.tokens;
  if (const auto ratio = bytes_per_token(loader)) result.bits_per_byte = result.loss / (std::numbers::ln2 * *ratio);
  return result;
}

}  // namespace moebius

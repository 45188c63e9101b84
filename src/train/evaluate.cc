#include "train/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "data/data_build.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

struct Sums {
  double nats = 0, tokens = 0;
};

std::optional<double> bytes_per_target(const std::string& prefix) {
  const auto info = read_dataset_info(prefix);
  if (!info || info->text_bytes == 0 || info->target_tokens == 0) return std::nullopt;
  return static_cast<double>(info->text_bytes) / static_cast<double>(info->target_tokens);
}

double take_loss_sum(Engine& engine) {
  engine.read_metrics();
  const double loss = *engine.on_host(engine.model().loss_sum()).ptr<double>();
  Stream s = engine.stream();
  fill_zero(s, engine.model().loss_sum());
  return loss;
}

// Adds the loss of this rank's tokens in the engine's batch.
void add_batch(Engine& engine, Sums& sums) {
  engine.forward();
  sums.nats += take_loss_sum(engine);
  const Tensor& weight_T = engine.batch().weight_T;
  for (int64_t t = 0; t < weight_T.numel(); ++t) sums.tokens += weight_T.ptr<float>()[t];
}

// Each rank has the tokens of its sequences; only ranks of the last stage have their loss.
void reduce(Engine& engine, Sums& sums) {
  Stream s(DeviceKind::cpu, engine.stream().pool());
  engine.mesh().group(Axis::dp_cp).all_reduce_sum(s, tensor_of(&sums.tokens, {1}));
  engine.mesh().group(Axis::dp_cp).all_reduce_sum(s, tensor_of(&sums.nats, {1}));
  engine.mesh().group(Axis::pp).all_reduce_sum(s, tensor_of(&sums.nats, {1}));
}

double mean(const Sums& sums) { return sums.tokens > 0 ? sums.nats / sums.tokens : 0.0; }

// Returns false when it was stopped before the end.
bool add_dataset(Engine& engine, Loader& loader, int dataset, int64_t max_batches, const std::function<bool()>& stop,
                 Sums& sums) {
  const int64_t B = engine.spec().shape.batch, n = loader.num_evaluated(dataset, max_batches);
  bool complete = true;
  for (int64_t round = 0; round < n; round += B * engine.data_share().dp) {
    complete = !stop || !stop();
    if (!complete) break;
    const int64_t first = round + engine.data_share().dp_rank * B;
    loader.fill_pass(engine.batch(), dataset, first, std::clamp<int64_t>(n - first, 0, B));
    add_batch(engine, sums);
  }
  reduce(engine, sums);
  return complete;
}

}  // namespace

EvalResult evaluate(Engine& engine, Loader& loader, int64_t max_batches, const std::function<bool()>& stop) {
  EvalResult result;
  Sums total;
  std::optional<double> total_bytes = 0.0;
  for (int i = 0; i < loader.order().num_datasets() && result.complete; ++i) {
    Sums sums;
    result.complete = add_dataset(engine, loader, i, max_batches, stop, sums);
    DatasetLoss set{.prefix = loader.order().dataset(i).prefix(), .loss = mean(sums), .tokens = sums.tokens};
    const auto ratio = bytes_per_target(set.prefix);
    if (ratio) set.bits_per_byte = set.loss / (std::numbers::ln2 * *ratio);
    total_bytes = ratio && total_bytes ? std::optional(*total_bytes + sums.tokens * *ratio) : std::nullopt;
    total.nats += sums.nats;
    total.tokens += sums.tokens;
    result.num_left_out += loader.order().num_left_out(i);
    result.datasets.push_back(std::move(set));
  }
  result.loss = mean(total);
  result.tokens = total.tokens;
  if (total_bytes && *total_bytes > 0) result.bits_per_byte = total.nats / (std::numbers::ln2 * *total_bytes);
  return result;
}

}  // namespace moebius

#include "model/step.h"

namespace moebius {
namespace {

void declare_targets(MemoryPlan& plan, const std::string& prefix, int64_t T, Targets& targets) {
  plan.declare(targets.target_T, prefix + "targets", {T}, DType::i32, Life::batch);
  plan.declare(targets.weight_T, prefix + "target_weights", {T}, DType::f32, Life::batch);
  plan.declare(targets.loss_scale_1, prefix + "loss_scale", {1}, DType::f32, Life::batch);
}

}  // namespace

void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch) {
  const int64_t T = shape.tokens();
  batch.shape = shape;
  plan.declare(batch.token_T, "tokens", {T}, DType::i32, Life::batch);
  declare_targets(plan, "", T, batch);
  batch.mtp_targets.resize(static_cast<size_t>(shape.num_mtp));
  for (size_t k = 0; k < batch.mtp_targets.size(); ++k)
    declare_targets(plan, fmt::format("mtp{}.", k), T, batch.mtp_targets[k]);
  plan.declare(batch.pos_T, "positions", {T}, DType::i32, Life::batch);
  plan.declare(batch.doc_start_T, "doc_starts", {T}, DType::i32, Life::batch);
  plan.declare(batch.segment_T, "segments", {T}, DType::i32, Life::batch);
  plan.declare(batch.draw_2, "draw", {2}, DType::i64, Life::batch);
}

}  // namespace moebius

#include "model/step.h"

namespace moebius {

void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch) {
  const int64_t T = shape.tokens();
  batch.shape = shape;
  plan.declare(batch.token_T, "tokens", {T}, DType::i32, Life::batch);
  plan.declare(batch.target_T, "targets", {T}, DType::i32, Life::batch);
  plan.declare(batch.weight_T, "target_weights", {T}, DType::f32, Life::batch);
  plan.declare(batch.pos_T, "positions", {T}, DType::i32, Life::batch);
  plan.declare(batch.doc_start_T, "doc_starts", {T}, DType::i32, Life::batch);
  plan.declare(batch.segment_T, "segments", {T}, DType::i32, Life::batch);
  plan.declare(batch.loss_scale_1, "loss_scale", {1}, DType::f32, Life::batch);
}

}  // namespace moebius

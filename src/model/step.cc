#include "model/step.h"

namespace moebius {

int64_t BatchShape::position_of(int64_t row) const {
  if (cp == 1) return row % seq;
  const int64_t length = chunk(), i = row % (2 * length);
  return i < length ? cp_rank * length + i : (2 * cp - 1 - cp_rank) * length + i - length;
}

BatchShape share_of(BatchShape whole, const MeshShape& mesh, const RankPlace& place) {
  MOEBIUS_CHECK(usage, mesh.cp == 1 || whole.seq % (2 * mesh.cp) == 0,
                "train.seq_len must be divisible by 2 * parallel.cp = {}; got {}", 2 * mesh.cp, whole.seq);
  whole.tp = mesh.tp, whole.tp_rank = place.tp, whole.cp = mesh.cp, whole.cp_rank = place.cp;
  MOEBIUS_CHECK(usage, whole.rows() % whole.tp == 0,
                "parallel.tp must divide train.micro_batch * seq_len / parallel.cp = {} * {} / {} = {}; got {}",
                whole.batch, whole.seq, whole.cp, whole.rows(), whole.tp);
  return whole;
}

void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch) {
  const int64_t T = shape.rows();
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

#include "model/step.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace moebius {
namespace {

static_assert(std::is_trivially_copyable_v<StepScalars>);

// Returns the bytes of StepScalars from `offset` on, as a tensor.
Tensor field(const Tensor& memory, size_t offset, Shape shape, DType dtype) {
  Tensor t{.data = memory.data, .shape = shape, .dtype = dtype, .device = memory.device};
  if (t.data) t.data = static_cast<char*>(t.data) + offset;
  return t;
}

}  // namespace

void MicroBatch::store_scalars() const {
  MOEBIUS_ASSERT(scalars_memory.device == DeviceKind::cpu && scalars_memory.data);
  std::memcpy(scalars_memory.data, &scalars, sizeof scalars);
}

Tensor MicroBatch::objective_scale_1(int64_t depth) const {
  const size_t offset = offsetof(StepScalars, objective_scale) + static_cast<size_t>(depth) * sizeof(float);
  return field(scalars_memory, offset, {1}, DType::f32);
}

Tensor MicroBatch::draw_2() const { return field(scalars_memory, offsetof(StepScalars, draw), {2}, DType::i64); }

Tensor MicroBatch::lr_and_step_2() const {
  return field(scalars_memory, offsetof(StepScalars, lr_and_step), {2}, DType::f64);
}

Tensor MicroBatch::total_tokens_1() const {
  return field(scalars_memory, offsetof(StepScalars, total_tokens), {1}, DType::f64);
}

std::vector<BatchTensor> tensors_of(MicroBatch& batch, const BatchShape& shape) {
  const Shape T{shape.tokens()};
  std::vector<BatchTensor> all{{&batch.token_T, "tokens", T, DType::i32},
                               {&batch.target_T, "targets", T, DType::i32},
                               {&batch.weight_T, "target_weights", T, DType::f32}};
  for (size_t k = 0; k < batch.mtp_targets.size(); ++k) {
    all.push_back({&batch.mtp_targets[k].target_T, fmt::format("mtp{}.targets", k), T, DType::i32});
    all.push_back({&batch.mtp_targets[k].weight_T, fmt::format("mtp{}.target_weights", k), T, DType::f32});
  }
  all.push_back({&batch.pos_T, "positions", T, DType::i32});
  all.push_back({&batch.doc_start_T, "doc_starts", T, DType::i32});
  all.push_back({&batch.segment_T, "segments", T, DType::i32});
  all.push_back({&batch.scalars_memory, "scalars", {int64_t{sizeof(StepScalars)}}, DType::u8});
  return all;
}

void declare_micro_batch(MemoryPlan& plan, const BatchShape& shape, MicroBatch& batch) {
  MOEBIUS_CHECK(usage, shape.num_mtp < StepScalars::kMaxDepths,
                "model: expected fewer than {} depths of multi-token prediction; got {}; set train.mtp_coeff = 0",
                StepScalars::kMaxDepths, shape.num_mtp);
  batch.shape = shape;
  batch.mtp_targets.resize(static_cast<size_t>(shape.num_mtp));
  for (BatchTensor& t : tensors_of(batch, shape)) plan.declare(*t.tensor, t.name, t.shape, t.dtype, Life::batch);
}

}  // namespace moebius

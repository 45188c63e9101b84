#include "engine/batch_buffers.h"

namespace moebius {
namespace {

// Returns the m-th buffer, or the only one, which the micro-batches use one after the other.
template <class All>
auto& of_micro_batch(All& all, int64_t m) {
  return all[all.size() == 1 ? 0 : static_cast<size_t>(m)];
}

MicroBatch mirrored(MicroBatch batch, const HostMirror& mirror) {
  for (const BatchTensor& t : tensors_of(batch, batch.shape)) *t.tensor = mirror.at(*t.tensor);
  return batch;
}

}  // namespace

BatchBuffers::BatchBuffers(MemoryPlan& plan, const BatchShape& shape, int64_t num_micro_batches, bool share_buffer)
    : num_(num_micro_batches), on_device_(static_cast<size_t>(share_buffer ? 1 : num_micro_batches)) {
  for (MicroBatch& batch : on_device_) declare_micro_batch(plan, shape, batch);
}

void BatchBuffers::bind(const MemoryPlan& plan, DeviceKind device) {
  if (device == DeviceKind::cuda) {
    for (int64_t i = 0; i < num_mirrors(); ++i) mirrors_.emplace_back(plan, Life::batch);
  }
  for (int64_t m = 0; m < num_; ++m) {
    const MicroBatch& batch = of_micro_batch(on_device_, m);
    host_.push_back(mirrors_.empty() ? batch : mirrored(batch, of_micro_batch(mirrors_, m)));
  }
}

const MicroBatch& BatchBuffers::on_device(int64_t m) {
  MicroBatch& batch = of_micro_batch(on_device_, m);
  if (host_.empty()) return batch;  // a plan that is being measured
  batch.scalars = host(m).scalars;
  batch.training = host(m).training;
  batch.cp = host(m).cp;
  batch.first_of_step = m == 0;
  return batch;
}

void BatchBuffers::upload(Stream& s, int64_t first, int64_t count) {
  if (s.device() == DeviceKind::null) return;
  MOEBIUS_ASSERT(on_device_.size() > 1 || count == 1);
  for (int64_t m = first; m < first + count; ++m) host(m).store_scalars();
  if (!mirrors_.empty()) of_micro_batch(mirrors_, first).to_device(s);
}

void BatchBuffers::set_lr_and_step(int64_t step, double lr) {
  for (MicroBatch& batch : host_) {
    batch.scalars.set_step(step);
    batch.scalars.set_lr(lr);
  }
}

}  // namespace moebius

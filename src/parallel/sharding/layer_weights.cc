#include "parallel/sharding/layer_weights.h"

#include <algorithm>
#include <utility>

#include "ops/elementwise/elementwise.h"

namespace moebius {

LayerWeights::LayerWeights(ParamTable& params, const std::vector<const GradBucket*>& buckets, MemoryPlan& plan,
                           bool overlap, bool on_host)
    : params_(params),
      overlap_(overlap),
      on_host_(on_host),
      memory_(overlap ? 2 : 1),
      buffers_(memory_.num_buffers()),
      staging_(memory_.num_buffers()) {
  for (const GradBucket* bucket : buckets) {
    memory_.add(*bucket, bucket->weight_share.dtype);
    has_shards_.resize(std::max(has_shards_.size(), static_cast<size_t>(bucket->layer) + 1));
  }
  memory_.declare(plan, "layer_weights", Life::comm);
  if (on_host_) declare_staging(plan);
}

void LayerWeights::gather(Stream& s, const ParamSpan& span, bool looks_further) {
  if (!overlap_) return;
  for_layers(params_, span, [&](int layer) {
    bring(s, layer);
    const int before = std::exchange(last_hint_, layer);
    const int next = layer > before ? layer + 1 : layer - 1;
    if (on_host_ && looks_further && has(next)) stage(s, next);
  });
}

void LayerWeights::ready(Stream& s, const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    bring(s, layer);
    wait(s, buffer_of(layer));
    if (!has(layer)) return;
    keep_shards(s, layer);
    ++buffer_of(layer).uses;
  });
}

void LayerWeights::release(const ParamSpan& span) {
  for_layers(params_, span, [&](int layer) {
    if (has(layer)) --buffer_of(layer).uses;
  });
}

void LayerWeights::changed(Stream& s) {
  leave_buffers(s);
  set_shards(s, /*are_new=*/false);
}

void LayerWeights::begin_closed(Stream& s, bool first_of_step) {
  leave_buffers(s);
  set_shards(s, /*are_new=*/!first_of_step);
}

void LayerWeights::end_closed(Stream& s) {
  leave_buffers(s);
  set_shards(s, /*are_new=*/true);
}

void LayerWeights::leave_buffers(Stream& s) {
  for (Buffer& buffer : buffers_) wait(s, buffer);
  for (Staging& staging : staging_) wait(s, staging);
  forget();
}

void LayerWeights::forget() {
  for (Buffer& buffer : buffers_) leave(buffer);
  for (Staging& staging : staging_) staging.layer = -1;
}

// In a capture the host does the same after each replay, which also leaves no layer in the buffers that it wrote.
void LayerWeights::set_shards(Stream& s, bool are_new) {
  has_shards_.assign(has_shards_.size(), are_new);
  if (!s.capture()) return;
  s.capture()->after_replay([this, are_new] {
    forget();
    has_shards_.assign(has_shards_.size(), are_new);
  });
}

// Copies this rank's shards of a layer out of its buffer, if they are older than the last update. The buffer then has
// weights that came from their owners.
void LayerWeights::keep_shards(Stream& s, int layer) {
  if (has_shards_[static_cast<size_t>(layer)]) return;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    const Tensor& shard = held.bucket->weight_shard;
    const int64_t first = held.bucket->shard_group->rank() * shard.numel();
    if (shard.empty()) continue;
    copy(s, shard, memory_.whole(layer, held).rows(first, first + shard.numel()));
    if (staging_of(layer).layer == layer) staging_of(layer).layer = -1;  // it has the share
  }
  has_shards_[static_cast<size_t>(layer)] = true;
}

bool LayerWeights::is_from_shards(int layer, const GradBucket& bucket) const {
  return has_shards_[static_cast<size_t>(layer)] && !bucket.weight_shard.empty();
}

Group& LayerWeights::group_of(int layer, const GradBucket& bucket) const {
  return is_from_shards(layer, bucket) ? *bucket.shard_group : *bucket.group;
}

const Tensor& LayerWeights::part_of(int layer, const GradBucket& bucket) const {
  return is_from_shards(layer, bucket) ? bucket.weight_shard : bucket.weight_share;
}

void LayerWeights::bring(Stream& s, int layer) {
  if (!has(layer) || buffer_of(layer).layer == layer) return;
  Buffer& buffer = buffer_of(layer);
  wait(s, buffer);
  leave(buffer);
  buffer.layer = layer;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    const Tensor whole = memory_.whole(layer, held);
    held.bucket->for_params(whole, [&](size_t i, void* at) { params_.set_weights(i, at, whole.device); });
  }
  std::vector<Tensor> from_host;
  if (on_host_) {
    prepare(s);
    copy_to_buffer(s, layer);
    stage(s, layer);
    wait(s, staging_of(layer));
    from_host = staged(layer);
    staging_of(layer).is_read = true;
  }
  for (size_t k = 0; k < memory_.of(layer).size(); ++k) {
    const LayerBuffers::Held& held = memory_.of(layer)[k];
    if (!on_host_)
      gather_bucket(s, buffer, held, part_of(layer, *held.bucket));
    else if (held.bucket->group->size() > 1)
      gather_bucket(s, buffer, held, from_host[k]);
  }
}

void LayerWeights::gather_bucket(Stream& s, Buffer& buffer, const LayerBuffers::Held& held, const Tensor& mine) {
  Group& group = group_of(buffer.layer, *held.bucket);
  const Tensor whole = memory_.whole(buffer.layer, held);
  if (overlap_)
    buffer.arriving.push_back(group.start_all_gather(s, whole, mine));
  else
    group.all_gather(s, whole, mine);
}

// --- from the host --------------------------------------------------------------------------------------------------

void LayerWeights::declare_staging(MemoryPlan& plan) {
  std::vector<int64_t> most(staging_.size());
  for (int layer = 0; layer < memory_.num_layers(); ++layer) {
    int64_t bytes = 0;
    for (const LayerBuffers::Held& held : memory_.of(layer)) {
      const GradBucket& bucket = *held.bucket;
      if (bucket.group->size() > 1) bytes += std::max(bucket.weight_share.num_bytes(), bucket.weight_shard.num_bytes());
    }
    int64_t& of_slot = most[memory_.buffer_of(layer)];
    of_slot = std::max(of_slot, bytes);
  }
  for (size_t i = 0; i < most.size(); ++i)
    if (most[i] > 0)
      plan.declare(staging_[i].memory, fmt::format("staged_weights{}", i), {most[i]}, DType::u8, Life::comm);
}

void LayerWeights::prepare(const Stream& s) {
  if (to_buffers_ || s.device() == DeviceKind::null) return;
  to_buffers_ = SideCopies::make(s);
  to_staging_ = SideCopies::make(s);
}

void LayerWeights::copy_to_buffer(Stream& s, int layer) {
  if (!to_buffers_) return;
  std::vector<SideCopies::Copy> copies;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    const Tensor& share = held.bucket->weight_share;
    if (held.bucket->group->size() == 1)
      copies.push_back({memory_.whole(layer, held).data, share.data, share.num_bytes()});
  }
  if (copies.empty()) return;
  to_buffers_->to_device(s, static_cast<int>(memory_.buffer_of(layer)), copies);
  buffer_of(layer).copies = true;
}

std::vector<Tensor> LayerWeights::staged(int layer) {
  std::vector<Tensor> parts;
  int64_t offset = 0;
  for (const LayerBuffers::Held& held : memory_.of(layer)) {
    Tensor& part = parts.emplace_back();
    if (held.bucket->group->size() == 1) continue;
    part = elements_of(staging_of(layer).memory, offset, part_of(layer, *held.bucket).numel(), held.dtype);
    offset += part.num_bytes();
  }
  return parts;
}

void LayerWeights::stage(Stream& s, int layer) {
  Staging& staging = staging_of(layer);
  if (!to_staging_ || staging.layer == layer) return;
  wait(s, staging);
  if (std::exchange(staging.is_read, false)) wait(s, buffer_of(layer));  // for the gather that reads it
  const std::vector<Tensor> parts = staged(layer);
  std::vector<SideCopies::Copy> copies;
  for (size_t k = 0; k < parts.size(); ++k) {
    if (parts[k].empty()) continue;
    const Tensor& mine = part_of(layer, *memory_.of(layer)[k].bucket);
    copies.push_back({parts[k].data, mine.data, mine.num_bytes()});
  }
  if (copies.empty()) return;
  to_staging_->to_device(s, static_cast<int>(memory_.buffer_of(layer)), copies);
  staging.layer = layer;
  staging.copies = true;
}

// --- waits ----------------------------------------------------------------------------------------------------------

// After a layer's weights have left the buffer, their tensors have no memory, so that nothing reads those of another
// layer by mistake.
void LayerWeights::leave(Buffer& buffer) {
  MOEBIUS_ASSERT(buffer.uses == 0 && "weights of a layer leave their buffer after its release");
  MOEBIUS_ASSERT(buffer.arriving.empty() && !buffer.copies);
  if (buffer.layer < 0) return;
  for (const LayerBuffers::Held& held : memory_.of(buffer.layer))
    for (const size_t i : held.bucket->indices) params_.set_weights(i, nullptr, DeviceKind::null);
  buffer.layer = -1;
}

void LayerWeights::wait(Stream& s, Buffer& buffer) {
  if (std::exchange(buffer.copies, false)) to_buffers_->wait_to_device(s, static_cast<int>(&buffer - buffers_.data()));
  for (Pending& each : buffer.arriving) each.wait();
  buffer.arriving.clear();
}

void LayerWeights::wait(Stream& s, Staging& staging) {
  if (std::exchange(staging.copies, false))
    to_staging_->wait_to_device(s, static_cast<int>(&staging - staging_.data()));
}

}  // namespace moebius

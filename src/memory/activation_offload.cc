#include "memory/activation_offload.h"

#include <vector>

namespace moebius {
namespace {

std::vector<SideCopies::Copy> copies_of(const OffloadedLayer& layer) {
  std::vector<SideCopies::Copy> copies;
  for (const OffloadedTensor& t : layer.tensors)
    if (!t.on_host.empty())
      copies.push_back({.device = t.on_device->data, .host = t.on_host.data, .num_bytes = t.on_host.num_bytes()});
  return copies;
}

}  // namespace

void ActivationOffload::begin() { slots_ = {}; }

void ActivationOffload::open(Stream& s, const OffloadedLayer& layer) {
  if (!copies_) return;
  copies_->wait_to_host(s, layer.slot);
  copies_->wait_to_device(s, layer.slot);
  slot_of(layer).holder = &layer;
}

void ActivationOffload::park(Stream& s, const OffloadedLayer& layer) {
  if (!copies_) return;
  copies_->to_host(s, layer.slot, copies_of(layer));
  int64_t bytes = 0;
  for (const OffloadedTensor& t : layer.tensors) bytes += t.on_host.num_bytes();
  if (GraphCapture* capture = s.capture())
    capture->after_replay([this, bytes] { bytes_to_host_ += bytes; });
  else
    bytes_to_host_ += bytes;
}

void ActivationOffload::fetch(Stream& s, const OffloadedLayer& layer) {
  if (!copies_ || slot_of(layer).holder == &layer) return;
  copies_->to_device(s, layer.slot, copies_of(layer));
  slot_of(layer).holder = &layer;
}

void ActivationOffload::ready(Stream& s, const OffloadedLayer& layer) {
  if (!copies_) return;
  fetch(s, layer);
  copies_->wait_to_device(s, layer.slot);
}

void ActivationOffload::end(Stream& s) {
  if (!copies_) return;
  for (int slot = 0; slot < SideCopies::kSlots; ++slot) {
    copies_->wait_to_host(s, slot);
    copies_->wait_to_device(s, slot);
  }
}

}  // namespace moebius

// Activations on the host (memory.offload). What a layer keeps between its forward and its backward pass is copied to
// host memory when its forward pass has ended, and brought back before its backward pass, one layer early.
//
// On the device such a layer has one of two slots while it runs, and layers take the two in turn:
//
//   forward    open(i)   its slot is free: the layer before the last one, which had it, is on the host
//              ...       the layer runs, beside the copy of the layer before it
//              park(i)   starts the copy to the host
//   backward   ready(i)  its tensors are in its slot
//              fetch     starts the copy of the layer that comes next, into the other slot
//              ...       the layer runs
//
// So the memory of a tensor never moves: layers, and CUDA graphs, know nothing of it. A layer that is still in its slot
// is not fetched. Each layer and each micro-batch in flight has memory of its own on the host (OffloadedLayer).
#pragma once

#include <array>
#include <memory>

#include "device/side_copies.h"
#include "memory/plan.h"

namespace moebius {

class ActivationOffload {
 public:
  ActivationOffload() = default;
  ActivationOffload(const ActivationOffload&) = delete;

  // Returns the slot of the next layer of this rank, in the order in which layers are made.
  int next_slot() { return num_layers_++ % SideCopies::kSlots; }
  // Called once memory is bound, before any pass: a GPU makes its streams.
  void prepare(const Stream& s) { copies_ = SideCopies::make(s); }

  // The passes of a layer. Each call concerns the work of s from now on; the host never waits. Without prepare() they do
  // nothing: a dry run has no memory.
  void begin();                                        // of a list of passes: nothing is in the slots
  void open(Stream& s, const OffloadedLayer& layer);   // before its forward pass
  void park(Stream& s, const OffloadedLayer& layer);   // after it
  void fetch(Stream& s, const OffloadedLayer& layer);  // REQUIRES that no later work needs what is in its slot
  void ready(Stream& s, const OffloadedLayer& layer);  // before a backward pass; it fetches where nobody did
  void end(Stream& s);                                 // of the list: all copies have ended

  // Bytes that went to the host since the last clear_bytes(); a replay of a CUDA graph counts as its passes do.
  int64_t bytes_to_host() const { return bytes_to_host_; }
  void clear_bytes() { bytes_to_host_ = 0; }

 private:
  struct Slot {
    const OffloadedLayer* holder = nullptr;  // the layer whose tensors are in it, or on their way to it
  };
  Slot& slot_of(const OffloadedLayer& layer) { return slots_[static_cast<size_t>(layer.slot)]; }

  int num_layers_ = 0;
  int64_t bytes_to_host_ = 0;
  std::unique_ptr<SideCopies> copies_;
  std::array<Slot, SideCopies::kSlots> slots_;
};

}  // namespace moebius

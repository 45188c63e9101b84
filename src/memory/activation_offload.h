// Offload of activations to host memory (memory.offload). The tensors that a layer saves for its backward pass are
// copied to the host after its forward pass, and copied back before its backward pass, one layer ahead.
//
// On the device an offloaded layer has one of two slots while it runs; layers alternate between the slots:
//
//   forward    open(i)   waits until the slot is free: layer i - 2, which used it, has been copied to the host
//              ...       layer i runs; the copy of layer i - 1 overlaps with it
//              park(i)   starts the copy of layer i to the host
//   backward   ready(i)  waits until the tensors of layer i are in its slot
//              fetch     starts the copy of the next layer into the other slot
//              ...       layer i runs
//
// The device address of a tensor never changes, so layers and CUDA graphs need not know of the offload. A layer that is
// still in its slot is not fetched. Each layer and micro-batch in flight has its own host memory (OffloadedLayer).
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

  // Assigns a slot to the next layer of this rank, in the order in which layers are constructed.
  int next_slot() { return num_layers_++ % SideCopies::kSlots; }
  // Called once after the plan is bound, before any pass. On a GPU it creates streams.
  void prepare(const Stream& s) { copies_ = SideCopies::make(s); }

  // The calls around the passes of a layer. They order work of s that is launched later; the host never waits. Without
  // prepare() they do nothing, as in a dry run, which has no memory.
  void begin();                                        // begins a list of passes: the slots are empty
  void open(Stream& s, const OffloadedLayer& layer);   // call it before the layer's forward pass
  void park(Stream& s, const OffloadedLayer& layer);   // call it after the layer's forward pass
  void fetch(Stream& s, const OffloadedLayer& layer);  // REQUIRES: no later work needs the slot's present contents
  void ready(Stream& s, const OffloadedLayer& layer);  // call it before the layer's backward pass; fetches if needed
  void end(Stream& s);                                 // ends the list: waits for all copies

  // Returns the bytes copied to the host since the last clear_bytes(). A replay of a CUDA graph counts like its passes.
  int64_t bytes_to_host() const { return bytes_to_host_; }
  void clear_bytes() { bytes_to_host_ = 0; }

 private:
  struct Slot {
    const OffloadedLayer* holder = nullptr;  // the layer whose tensors are in it, or in flight to it
  };
  Slot& slot_of(const OffloadedLayer& layer) { return slots_[static_cast<size_t>(layer.slot)]; }

  int num_layers_ = 0;
  int64_t bytes_to_host_ = 0;
  std::unique_ptr<SideCopies> copies_;
  std::array<Slot, SideCopies::kSlots> slots_;
};

}  // namespace moebius

// Memory is declared, planned, then bound. Constructors declare every tensor with a name and a life. A dry run of a
// step on the null device measures the step stack. bind() allocates each life once and fills in the views. After that
// nothing is allocated.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "config/policy_spec.h"
#include "core/arena.h"
#include "core/tensor.h"
#include "device/device.h"
#include "device/peer_memory.h"
#include "device/spill_buffer.h"

namespace moebius {

enum class Life : int {
  param,         // weights in the dtype of the computation
  master,        // f32 weights, where param is not f32
  grad,          // sums of gradients
  layer_grad,    // f32 gradients of one layer; layers share this memory when gradients are summed in bf16
  optimizer,     // moments
  state,         // values that training changes without a gradient: expert biases, load of the last step,
                 // quantised copies of weights
  batch,         // tokens, targets, positions of a micro-batch
  saved,         // tensors that forward saves for backward, of every micro-batch in flight
  rows,          // expert rows of the current layer; the routing decides how many are used
  comm,          // data that arrives from other ranks
  metrics,       // sums read at the end of a step
  offload_even,  // device slot 0 of offloaded activations (memory/activation_offload.h)
  offload_odd,   // device slot 1
  host,          // data in host memory
  stack,         // the step stack: scratch memory of a step
};
inline constexpr int kNumLives = 15;
std::string_view name_of(Life life);

// An activation on the device, and its copy on the host.
struct OffloadedTensor {
  const Tensor* on_device = nullptr;
  Tensor on_host;
};
// The offloaded activations of one layer and one micro-batch. It must not move once they are declared.
struct OffloadedLayer {
  int slot = 0;  // 0: offload_even, 1: offload_odd
  std::deque<OffloadedTensor> tensors;
};

class MemoryPlan {
 public:
  explicit MemoryPlan(const RecomputeSpec& recompute = {}, const OffloadSpec& offload = {})
      : asked_(recompute), offload_(offload) {
    enter_layer(0);
  }
  MemoryPlan(const MemoryPlan&) = delete;

  // Makes `view` a tensor without memory on the null device. bind() fills it in: it must not move
  // until then. Every tensor of a life starts at a multiple of kAlign elements, so that lives with
  // the same declarations correspond element by element.
  void declare(Tensor& view, std::string name, Shape shape, DType dtype, Life life);

  // Declares a tensor of Life::rows. Its first `near_rows` rows are in device memory. The others are in host memory,
  // which the device accesses in place (device/spill_buffer.h), and use no memory before they are written.
  void declare_rows(Tensor& view, std::string name, Shape shape, DType dtype, int64_t near_rows);
  int64_t spill_bytes() const { return rows_extent_ - bytes(Life::rows); }  // of the rows in host memory
  // Places tensors of this life that are declared from now on in the memory of those declared before.
  void reuse(Life life) { reused_[static_cast<int>(life)] = true; }

  // Declares a tensor that backward recomputes (memory/saved_tensor.h): `view` stays a shape without memory.
  void declare_recomputed(Tensor& view, Shape shape, DType dtype);
  // Tensors that are declared from now on belong to this layer of the model; recompute() has its settings.
  void enter_layer(int64_t layer) { recompute_ = asked_.of(layer); }
  const RecomputeSpec& recompute() const { return recompute_; }
  const RecomputeSpec& recompute_of_all() const { return asked_; }

  // From now on, tensors that memory.offload names are offloaded, and listed in `to`. On the device they are in the
  // memory of the slot, which all layers of that slot share. null: no tensors from now on are offloaded.
  void offload_to(OffloadedLayer* to);
  const OffloadSpec& offload() const { return offload_; }
  bool offloads(bool RecomputeSpec::*what) const { return offloaded_ && offload_.covers(what); }
  bool offloads_layer_input() const { return offloaded_ && offload_.covers_layer_input(); }
  // Declares an offloaded tensor (memory/saved_tensor.h).
  void declare_offloaded(Tensor& view, std::string name, Shape shape, DType dtype);

  // Sets whether other passes may come between backward_input and backward_weight of a micro-batch. If so, WgradInputs
  // (memory/wgrad_input.h) that are declared from now on are kept until backward_weight.
  void split_backward(bool splits) { splits_backward_ = splits; }
  bool splits_backward() const { return splits_backward_; }

  // Places these tensors one after another in this order, each at a multiple of kAlign elements.
  // They must be of one life and dtype, and not joined before. The space after the last one is left
  // free up to a multiple of `multiple` elements, which is itself a multiple of kAlign.
  // Together they are one tensor of joined_numel() elements that begins where the first one does.
  void join(const std::vector<const Tensor*>& views, int64_t multiple);
  static int64_t joined_numel(const std::vector<const Tensor*>& views, int64_t multiple);

  // Removes a declared tensor from the plan. Its view stays a shape without memory until its owner sets one.
  void withdraw(const Tensor& view);

  // Makes the memory of Life::comm accessible to other ranks (device/peer_memory.h). peer_memory() is that memory after
  // bind(); its data() is null without share_comm().
  void share_comm() { shares_comm_ = true; }
  const PeerMemory& peer_memory() const { return comm_; }

  // Allocates zeroed memory and binds every tensor. stack_bytes: the high-water mark of the dry run.
  void bind(DeviceKind device, int64_t stack_bytes);
  StepStack& stack() { return stack_; }

  int64_t bytes(Life life) const;                               // planned
  int64_t offloaded_bytes() const { return offloaded_bytes_; }  // of Life::host: activations
  int64_t device_bytes() const;                                 // bytes of all lives but Life::host
  void* base(Life life) const;                                  // call it after bind(); a life is one allocation
  int64_t total_bytes() const;
  // Returns the table that is printed before the first step: bytes per life, and
  // the largest tensors.
  std::string table() const;

  static constexpr int64_t kAlign = 256;  // a block of 8-bit codes: core/block_code.h

 private:
  struct Entry {
    std::string name;
    Tensor* view;
    Life life;
    int64_t offset = 0;
    int64_t free_bytes = 0;  // left free after it
    int64_t near_bytes = 0;  // bytes of Life::rows in the memory of the device
    bool reuses = false;     // starts at the beginning of its life
    bool is_joined = false;
  };
  std::deque<Entry>::iterator entry_of(const Tensor& view);
  void place(Entry& entry);
  void place_all();
  void place_rows(Entry& entry);
  SpillBuffer rows_buffer(DeviceKind device) const;

  RecomputeSpec asked_, recompute_;
  OffloadSpec offload_;
  OffloadedLayer* offloaded_ = nullptr;
  bool splits_backward_ = false;
  int64_t recomputed_bytes_ = 0, offloaded_bytes_ = 0;
  std::deque<Entry> entries_;
  std::array<int64_t, kNumLives> used_{}, bytes_{};  // bytes_: the maximum of used_, if a life is reused
  std::array<bool, kNumLives> reused_{};
  int64_t rows_extent_ = 0;  // addresses of Life::rows
  std::array<Buffer, kNumLives> buffers_;
  SpillBuffer rows_;  // instead of a buffer
  HostBuffer host_;   // instead of a buffer
  PeerMemory comm_;   // instead of a buffer
  bool shares_comm_ = false;
  StepStack stack_{DeviceKind::null, nullptr, 0};
  bool bound_ = false;
};

// Returns "1.23 GiB", "45.6 MiB".
std::string bytes_text(int64_t bytes);

}  // namespace moebius

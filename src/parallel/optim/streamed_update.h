// An update whose masters and moments are in host memory (optimizer.offload). They pass through a few slots of device
// memory, piece by piece: while the device updates one piece, the next ones arrive and those before it are copied
// back. The pieces are in the order in which a forward pass reads the weights, and no bit depends on them. Weights on
// the host (in memory.offload) and sums of gradients there pass through the slots too. Parameters with all of their
// data on the device (parallel/optim/kept_states.h) are updated beside that, on the stream that waits for them.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/streamed_work.h"
#include "parallel/optim/trained_params.h"

namespace moebius {

class StreamedUpdate {
 public:
  // Updates tensors that are on the device, as Optimizer::update() does.
  using Rule = std::function<void(Stream&, std::span<const UpdatedTensor>, const OptimizerStepArgs&)>;

  // Declares the slots. Null if no update needs them. `params` outlives it.
  static std::unique_ptr<StreamedUpdate> make(const OptimizerContext& context, const TrainedParams& params, Rule rule);
  StreamedUpdate(const OptimizerContext& context, const TrainedParams& params, int64_t slot_bytes, Rule rule);
  StreamedUpdate(const StreamedUpdate&) = delete;

  // Starts the update, which comes after all work of s so far. On the null device it is complete.
  void start(Stream& s, const OptimizerStepArgs& args);
  // Returns arguments for a later start(), with a copy of lr and step that s makes. scale_1 is not copied.
  OptimizerStepArgs kept(Stream& s, const OptimizerStepArgs& args) const;
  // Makes work of s from now on wait until these parameters, indices of all() of the table, have their new weights, and
  // their gradients were read.
  void wait(Stream& s, std::span<const size_t> params);
  // Makes work of s from now on wait for the whole update, and for the copies to the host. Each start() has one.
  void finish(Stream& s);
  // Returns the time that the copies of the last update took. REQUIRES: the device has ended it.
  double seconds() const { return work_ ? work_->seconds() : 0; }

 private:
  struct Piece {
    std::vector<UpdatedTensor> tensors;  // in host memory, then in that of the slot
    int64_t num_bytes = 0;
  };
  // A parameter of the table.
  struct OfParam {
    std::vector<UpdatedTensor> here;  // with all data on the device
    bool is_waited = false;           // in this update
    int64_t num_jobs = 0;             // the number of jobs up to its last one
  };
  void prepare(const Stream& s);
  void add(std::vector<Piece>& pieces, const UpdatedTensor& tensor) const;
  StreamedJob job_of(Piece& piece, int slot);
  bool is_on_host(const Tensor& t) const;
  bool is_here(const UpdatedTensor& t) const { return bytes_of_element(t) == 0; }
  int64_t bytes_of_element(const UpdatedTensor& t) const;

  const MemoryPlan& plan_;
  const ParamTable& table_;
  const TrainedParams& params_;
  Rule rule_;
  int64_t slot_bytes_;
  std::vector<Tensor> slots_;  // u8 [slot_bytes]
  Tensor lr_and_step_2_;       // f64
  OptimizerStepArgs args_;     // of the update that runs
  std::unique_ptr<StreamedWork> work_;
  std::vector<StreamedJob> jobs_;
  std::vector<OfParam> of_params_;
};

// The number of slots, and the bytes of each for states of this size, wherever they are. 0: there are none.
inline constexpr int kStreamedSlots = 4;
int64_t streamed_slot_bytes(int64_t states_bytes);
// Returns the bytes of the master and the moments of `count` elements, as streamed_slot_bytes() takes them; 0 if they
// are not streamed.
int64_t streamed_bytes(const OptimizerSpec& spec, DType weights, int64_t count);
// Returns whether states of `bytes` streamed_bytes() pass through slots, or their gradients do. sums_apart:
// Param::sums_apart().
bool needs_slots(const OptimizerSpec& spec, int64_t bytes, bool keeps_states, bool sums_apart);

}  // namespace moebius

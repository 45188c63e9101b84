// The shared expert of an MoE layer: a dense SwiGLU layer that computes all tokens, with or without a gate:
//   y[t] += mlp(x[t])   or   y[t] += sigmoid(x[t] w_g) mlp(x[t])
// A long micro-batch is computed in chunks of rows (model/layers/row_chunks.h). Each chunk is recomputed right before
// its backward pass, and its weight gradients follow at once. So scratch has the rows of a chunk.
#pragma once

#include <optional>
#include <vector>

#include "model/layers/mlp.h"

namespace moebius {

class SharedExpert {
 public:
  struct Saved {
    std::vector<Mlp::Saved> chunks;
    Tensor x_tD;  // the caller's
    // Only with a gate: mlp(x); the gate's argument, f32; and the derivative w.r.t. it.
    SavedTensor mlp_y_tD;
    Tensor gate_t;
    WgradInput dgate_t1;
    bool weights_follow = true;  // backward_weight of a chunk runs right after its backward_input
  };
  SharedExpert(const LayerContext& c, const std::string& prefix);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;
  bool is_chunked() const { return chunk_ < t_; }

  // The parts of the forward pass, in this order. open() returns the tensor of x's shape to which mlp() writes: it is
  // on the step stack, or with a gate it may be saved. add_to() adds it to y, with a gate times sigmoid(x w_g).
  Tensor open(Step& step, Tensor x_tD, Saved& saved) const;
  void mlp(Step& step, Tensor mlp_y_tD, Tensor x_tD, Saved& saved) const;
  void add_to(Step& step, Tensor y_tD, Tensor mlp_y_tD, Tensor x_tD, const Saved& saved) const;
  void recompute(Step& step, Tensor x_tD, Saved& saved) const;

  // Adds to dx. In chunks, it adds to the gradients of weights too, if no other pass comes before backward_weight.
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const;
  // The parts of backward_input. backward_hidden needs only dy, and computes what backward_x and backward_weight read.
  // backward_x adds to dx. REQUIRES: !is_chunked()
  void backward_hidden(Step& step, Tensor dy_tD, Saved& saved) const;
  void backward_x(Step& step, Tensor dx_tD, Saved& saved) const;
  void backward_weight(Step& step, const Saved& saved) const;
  static std::vector<KeptTensor> kept(const Saved& saved);

 private:
  // Returns the derivative w.r.t. mlp(x) of the rows [begin, begin + dy.dim(0)), and writes their dgate_t1.
  Tensor through_gate(Step& step, Tensor dy_tD, Tensor mlp_y_tD, int64_t begin, Saved& saved) const;
  void backward_chunk(Step& step, Tensor dx_tD, Tensor dy_tD, int64_t i, Saved& saved) const;

  int64_t t_, D_, chunk_;
  DType dtype_;
  Mlp mlp_;
  std::optional<Linear> gate_;
};

}  // namespace moebius

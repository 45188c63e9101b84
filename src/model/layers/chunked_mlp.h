// A dense SwiGLU layer that takes the rows of a long micro-batch in chunks, one after the other, so that its scratch
// does not grow with the length: 6 F numbers a row, which recomputed activations have too. A chunk is forwarded, and
// passed backward with its weight gradients, as a micro-batch of that many rows is.
//
// The rows of a chunk follow from the number of rows alone (model/moe/chunked_experts.h: expert_chunk). So runs with
// as many rows on a rank sum weight gradients in one order, whatever they keep or recompute.
#pragma once

#include <vector>

#include "model/layers/mlp.h"

namespace moebius {

class ChunkedMlp {
 public:
  struct Saved {
    std::vector<Mlp::Saved> chunks;
    bool weights_follow = true;  // backward_weight of a chunk runs right after its backward_input
  };
  // chunk: rows of this rank, a divisor of c.stream_rows().
  ChunkedMlp(const LayerContext& c, const std::string& prefix, int64_t hidden, int64_t chunk);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // The calls of FeedForward. recompute() only notes x: each chunk is recomputed right before its backward pass.
  void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const;
  void recompute(Step& step, Tensor x_tD, Saved& saved) const;
  void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const;
  void backward_weight(Step& step, const Saved& saved) const;
  static std::vector<KeptTensor> kept(const Saved& saved);

 private:
  int64_t t_, chunk_;
  Mlp mlp_;
};

}  // namespace moebius

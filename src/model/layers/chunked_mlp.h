// A dense SwiGLU layer that computes a long micro-batch in chunks of rows, one after another. So its scratch, 6 F
// elements per row, does not grow with the length of the sequence. Each chunk has its own forward and backward passes.
//
// The size of a chunk depends on the number of rows alone (model/layers/row_chunks.h).
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
  // chunk: rows of a chunk, a divisor of c.stream_rows().
  ChunkedMlp(const LayerContext& c, const std::string& prefix, int64_t hidden, int64_t chunk);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // The methods of FeedForward. recompute() only stores x: each chunk is recomputed right before its backward pass.
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

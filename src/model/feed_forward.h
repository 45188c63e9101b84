// The interface of the feed-forward half of a decoder layer. The constructor of a block chooses a dense layer
// (model/layers/mlp.h) or a Mixture of Experts (model/moe/moe.h). x and y [t, D] are this rank's rows
// of the residual stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/moe/moe.h"

namespace moebius {

class FeedForward {
 public:
  // The tensors that forward saves for the backward passes of a micro-batch. Each kind of layer derives its own.
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~FeedForward() = default;
  virtual std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  virtual void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const = 0;
  // Recomputes what forward did not keep. Call it before a backward pass, with the same x.
  virtual void recompute(Step& step, Tensor x_tD, Saved& saved) const = 0;
  virtual void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const = 0;
  virtual void backward_weight(Step& step, const Saved& saved) const = 0;
  // Runs both backward passes, with the same bits. Parts of them may overlap.
  virtual void backward(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const = 0;

  // Returns the saved tensors for diagnosis, in the order in which they were computed.
  virtual std::vector<KeptTensor> kept(const Saved& saved) const = 0;
  // The MoE layer and its saved tensors, for metrics; null in a dense layer.
  virtual const Moe* moe() const = 0;
  virtual const Moe::Saved* moe_saved(const Saved& saved) const = 0;

  // The pass of generation. x is norm.y, which this computes, before it writes to the step stack.
  virtual void forward_normed(Step& step, Tensor y_tD, const RmsNormFwd& norm, Saved& saved) const = 0;
};

// Makes the feed-forward half of a layer of c.model. The names of its parameters begin with prefix.
std::unique_ptr<FeedForward> make_feed_forward(const LayerContext& c, const std::string& prefix, int64_t layer);

}  // namespace moebius

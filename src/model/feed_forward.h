// The feed-forward half of a decoder layer: dense (model/layers/mlp.h) or a Mixture of
// Experts (model/moe/moe.h), chosen once when a block is made. x and y are this rank's
// rows t of the residual stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/moe/moe.h"

namespace moebius {

class FeedForward {
 public:
  // The tensors that forward leaves for the backward passes of a micro-batch. Each kind has its own.
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
  // Both, with the same bits. Parts of them may run beside each other.
  virtual void backward(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const = 0;

  // For diagnosis, in the order they were computed.
  virtual std::vector<KeptTensor> kept(const Saved& saved) const = 0;
  // The Mixture of Experts and its saved tensors, for metrics; null in a dense layer.
  virtual const Moe* moe() const = 0;
  virtual const Moe::Saved* moe_saved(const Saved& saved) const = 0;
};

// The feed-forward half of a layer of c.model, whose parameters begin with prefix.
std::unique_ptr<FeedForward> make_feed_forward(const LayerContext& c, const std::string& prefix, int64_t layer);

}  // namespace moebius

// One decoder layer: attention and feed-forward, each after a norm, around the residual stream.
//
// Between layers the residual stream is a pair: `base`, and `delta`, the last layer's output, which
// is not added yet. The next norm adds the two in the pass in which it reads them.
#pragma once

#include <memory>

#include "model/attention/attention.h"
#include "model/feed_forward.h"
#include "model/layers/norm.h"

namespace moebius {

struct Residual {
  Tensor base_TD;  // empty before the first layer
  Tensor delta_TD;
  Tensor buffer_TD;  // memory for a base that the layer does not keep
};

class Block {
 public:
  struct Saved {
    Norm::Saved norm1, norm2;
    SavedTensor n1_TD, n2_TD;  // the norms' outputs: inputs of attention and feed-forward
    std::unique_ptr<Attention::Saved> attention;
    std::unique_ptr<FeedForward::Saved> feed_forward;
  };
  // layer: its index in c.model.
  Block(const LayerContext& c, int64_t layer);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // Reads the residual. Leaves the new base in it, and its output in delta, which keeps its memory.
  void forward(Step& step, Residual& residual, Saved& saved) const;

  // dresidual: on entry the derivative w.r.t. the stream after the layer, on return that before it.
  // Runs both backward passes: each half's backward_weight follows its backward_input at once.
  // with_input: else nothing below is trained, so what only leads there is not computed, and dresidual is
  // undefined on return.
  void backward(Step& step, Tensor dresidual_TD, Saved& saved, bool with_input = true) const;
  // The two passes separately; the bits are the same. Norms, router and sinks add their
  // gradients in the first. REQUIRES: declare_saved() with MemoryPlan::split_backward. Both
  // recompute what forward did not keep.
  void backward_input(Step& step, Tensor dresidual_TD, Saved& saved, bool with_input = true) const;
  void backward_weight(Step& step, Saved& saved) const;

  // Generation: the same pass, with the attention's keys and values of all tokens so far in `cache`.
  void forward_cached(Step& step, Residual& residual, Saved& saved, const KvCache& cache, const CachedRows& rows) const;
  void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const;

  // The Mixture of Experts and its saved tensors; null in a dense layer.
  const Moe* moe() const { return feed_forward_->moe(); }
  const Moe::Saved* moe_saved(const Saved& saved) const { return feed_forward_->moe_saved(*saved.feed_forward); }
  // For diagnosis, in the order they were computed.
  std::vector<KeptTensor> kept(const Saved& saved) const;

 private:
  // Both forward passes; attend(y_TD, x_TD) computes the attention of the rows.
  template <class Attend>
  void run_forward(Step& step, Residual& residual, Saved& saved, Attend attend) const;
  void recompute_attention(Step& step, Saved& saved) const;
  void recompute_feed_forward(Step& step, Saved& saved) const;
  struct BackwardParts {
    bool weights, input;
  };
  void run_backward(Step& step, Tensor dresidual_TD, Saved& saved, BackwardParts parts) const;

  int64_t D_, max_tokens_;
  DType dtype_;
  Norm norm1_;
  std::unique_ptr<Attention> attention_;
  Norm norm2_;
  std::unique_ptr<FeedForward> feed_forward_;
  bool trains_attention_;
};

}  // namespace moebius

// One decoder layer: norm, attention, norm and feed-forward, with a residual stream around each half.
//
// Between layers the residual stream is a pair: `base`, and `delta`, the output of the last layer, which is not added
// yet. The next norm adds the two in the same pass over memory.
#pragma once

#include <memory>

#include "model/attention/attention.h"
#include "model/feed_forward.h"
#include "model/layers/norm.h"

namespace moebius {

struct Residual {
  Tensor base_TD;  // empty before the first layer
  Tensor delta_TD;
  Tensor buffer_TD;  // memory for a base that the layer does not save
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

  // Replaces residual.base by the new base, and writes the output of the layer into the memory of residual.delta.
  void forward(Step& step, Residual& residual, Saved& saved) const;

  // Runs both backward passes: in each half, backward_weight follows backward_input at once.
  // dresidual: on entry the derivative w.r.t. the stream after the layer, on return that w.r.t. the stream before it.
  // with_input: false if no parameter below this layer is trained. Then dresidual is undefined on return, and products
  // that only serve it are left out.
  void backward(Step& step, Tensor dresidual_TD, Saved& saved, bool with_input = true) const;
  // The two backward passes separately, with the same bits. backward_input also adds the gradients of norms, router and
  // sinks. Both recompute what forward did not keep. REQUIRES: declare_saved() with MemoryPlan::split_backward.
  void backward_input(Step& step, Tensor dresidual_TD, Saved& saved, bool with_input = true) const;
  void backward_weight(Step& step, Saved& saved) const;

  // The pass of generation: keys and values of earlier tokens are in `cache`.
  void forward_cached(Step& step, Residual& residual, Saved& saved, const KvCache& cache, const CachedRows& rows) const;
  void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const;

  // The MoE layer and its saved tensors; null in a dense layer.
  const Moe* moe() const { return feed_forward_->moe(); }
  const Moe::Saved* moe_saved(const Saved& saved) const { return feed_forward_->moe_saved(*saved.feed_forward); }
  // Returns the saved tensors for diagnosis, in the order in which they were computed.
  std::vector<KeptTensor> kept(const Saved& saved) const;

 private:
  // The common code of forward() and forward_cached(). attend(y_TD, norm) and feed(y_TD, norm) compute a half of the
  // layer, with the norm before it.
  template <class Attend, class Feed>
  void run_forward(Step& step, Residual& residual, Saved& saved, Attend attend, Feed feed) const;
  Attention::Input attention_input(Step& step, Saved& saved) const;  // valid as long as both arguments
  void recompute_attention(Step& step, Saved& saved) const;
  void attention_backward_weight(Step& step, Saved& saved) const;
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

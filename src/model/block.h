// One decoder layer: attention and feed-forward, each behind a norm, around the residual stream.
//
// Between layers the residual stream is a pair: `base`, and `delta`, the last layer's output not added yet. The next
// norm adds them in the pass in which it reads them.
#pragma once

#include <optional>

#include "model/attention/gqa.h"
#include "model/attention/mla.h"
#include "model/layers/norm.h"
#include "model/moe/moe.h"

namespace moebius {

struct Residual {
  Tensor base_TD;  // empty before the first layer
  Tensor delta_TD;
  Tensor room_TD;  // where a layer leaves a base that it does not keep
};

class Block {
 public:
  struct Saved {
    Norm::Saved norm1, norm2;
    SavedTensor n1_TD, n2_TD;  // the norms' outputs: inputs of attention and feed-forward
    Gqa::Saved attention;
    Mla::Saved latent_attention;
    Mlp::Saved mlp;
    Moe::Saved moe;
  };
  Block(ParamTable& params, MemoryPlan& plan, const ModelSpec& model, const BalanceSpec& balance, DType dtype,
        const Mesh& mesh, const BatchShape& shape, const Tensor& rope_table_Pd, int64_t layer, uint64_t seed,
        const std::string& dispatcher = "auto", bool fusion = true);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // Reads the residual, leaves the new base in it and its output in delta (the same memory as before).
  void forward(Step& step, Residual& residual, Saved& saved) const;
  // dresidual: derivative by the stream after the layer in, before it out.
  // Input and weight gradients follow each other.
  void backward(Step& step, Tensor dresidual_TD, Saved& saved) const;
  // Generation.
  void forward_cached(Step& step, Residual& residual, Saved& saved, const KvCache& cache, int64_t first) const;

  const Moe* moe() const { return moe_ ? &*moe_ : nullptr; }

 private:
  void attend(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  void remake_attention(Step& step, Saved& saved) const;
  void attention_output(Step& step, Tensor y_TD, const Saved& saved) const;
  void attend_backward(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;
  void remake(Step& step, Saved& saved) const;
  void feed_forward(Step& step, Residual& residual, Tensor attended_TD, Saved& saved) const;

  int64_t D_, max_tokens_;
  DType dtype_;
  Norm norm1_;
  std::optional<Gqa> gqa_;  // a layer has this,
  std::optional<Mla> mla_;  // or with latent attention this
  Norm norm2_;
  std::optional<Mlp> mlp_;  // a dense layer has this,
  std::optional<Moe> moe_;  // an MoE layer this
};

}  // namespace moebius

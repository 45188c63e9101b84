// Keys and values of latent attention, computed from the latent that all heads share (model/attention/mla.h):
//   [k_nope | v] = W_kvb c,  k = [k_nope | k_rope] per head
// c is the normalised latent of width R, and k_rope [r] is rotated. They have R + r numbers per row; keys and values
// have H (n + r + v). So cp ranks exchange the latents (KvExpansion): sent.k_TGd is c [T, 1, R], and sent.v_TGd is
// k_rope [T, 1, r].
#pragma once

#include "model/attention/context_parallel.h"
#include "model/layers/linear.h"

namespace moebius {

class LatentKv final : public KvExpansion {
 public:
  // The widths of a head: of k without RoPE (n), of k with RoPE (r), and of v.
  struct Widths {
    int64_t nope, rope, v;
  };
  LatentKv(const LayerContext& c, const ParamSpec& w_kvb, const Widths& widths);
  const ColumnLinear& w() const { return w_; }

  // Returns whether cp ranks exchange latents. They exchange keys and values instead if W_kvb has an adapter, or is
  // quantised and each rank would need the rows of its own heads.
  bool is_exchanged() const { return is_exchanged_; }
  void put_together(Step& step, const Kv& out, Tensor kv_THw, Tensor k_rope_Tr) const;
  Kv expand(Step& step, const Kv& sent, const HeadRange& heads) const override;
  void expand_bwd(Step& step, const Bwd& a) const override;

 private:
  bool are_all(const HeadRange& heads) const { return heads.count * head_width() == w_.param().w.dim(0); }
  int64_t head_width() const { return widths_.nope + widths_.v; }
  Tensor rows_of(const Tensor& x, const HeadRange& heads) const {  // of W_kvb or its gradient
    return x.rows(heads.first * head_width(), (heads.first + heads.count) * head_width());
  }

  ColumnLinear w_;
  Widths widths_;
  bool is_exchanged_;
};

}  // namespace moebius

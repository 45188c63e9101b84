// Keys and values of latent attention, from what a token's heads share (model/attention/mla.h):
//   [k_nope | v] = W_kvb c,  k = [k_nope | k_rope] per head
// c is the normed latent of width R, and k_rope is rotated. R + r numbers a row stand for H (n + r + v).
// So these are what ranks of cp exchange (KvExpansion): sent.k_TGd is c [T, 1, R], sent.v_TGd is k_rope [T, 1, r].
#pragma once

#include "model/attention/context_parallel.h"
#include "model/layers/linear.h"

namespace moebius {

class LatentKv final : public KvExpansion {
 public:
  // The widths of a head: k without and with rotation, and v.
  struct Widths {
    int64_t nope, rope, v;
  };
  LatentKv(const LayerContext& c, const ParamSpec& w_kvb, const Widths& widths);
  const ColumnLinear& w() const { return w_; }

  // Returns whether ranks of cp exchange latents. Else they exchange keys and values: where W_kvb has an adapter, or is
  // quantised and each rank would need its own heads' rows of it.
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

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

  // Returns whether attention expands latents where it reads keys and values: where cp ranks exchange them, and on a
  // long sequence (model/layers/row_chunks.h). Ranks exchange keys and values instead if W_kvb has an adapter, or is
  // quantised and each rank would need the rows of its own heads, or draws by tokens (nvfp4 on ranks of tp or cp).
  bool is_expanded_late() const { return is_expanded_late_; }
  void put_together(Step& step, const Kv& out, Tensor kv_THw, Tensor k_rope_Tr) const;
  Kv expand(Step& step, const Kv& sent, const HeadRange& heads) const override;
  void expand_bwd(Step& step, const Bwd& a) const override;

 private:
  // The rows that are expanded at a time, with scratch for them alone. They depend on the number of rows.
  int64_t chunk_of(int64_t rows) const;
  void expand_rows_bwd(Step& step, const Bwd& a) const;
  bool are_all(const HeadRange& heads) const { return heads.count * head_width() == w_.param().w.dim(0); }
  int64_t head_width() const { return widths_.nope + widths_.v; }
  Tensor rows_of(const Tensor& x, const HeadRange& heads) const {  // of W_kvb or its gradient
    return x.rows(heads.first * head_width(), (heads.first + heads.count) * head_width());
  }

  ColumnLinear w_;
  Widths widths_;
  int64_t max_chunk_;
  bool is_expanded_late_;
};

}  // namespace moebius

// The parameters of grouped-query attention on a rank: their names, shapes, and the parts that tp splits.
// prefix: the beginning of their names, such as "model.layers.0.self_attn".
#pragma once

#include "model/layer_context.h"

namespace moebius {

// Returns one matrix with the rows of q, k and v of this rank's heads, so that the three projections are one product.
ParamSpec qkv_spec(const LayerContext& c, const std::string& prefix);
ParamSpec qkv_bias_spec(const LayerContext& c, const std::string& prefix);
ParamSpec o_spec(const LayerContext& c, const std::string& prefix);
// The bias is added after the sum over tp, so every rank has all of it.
ParamSpec o_bias_spec(const LayerContext& c, const std::string& prefix);
// Returns one number per head, in f32.
ParamSpec sinks_spec(const LayerContext& c, const std::string& prefix);
// Returns the weight of the norm of q or k. A norm per head is shared by all heads and whole on every rank; a norm over
// all heads is split like the heads.
ParamSpec qk_norm_spec(const LayerContext& c, const std::string& name, int64_t heads);

// Returns whether rope_fwd and rope_bwd apply the norms of q and k. Other ops do if the heads that are normalised
// together are on several tp ranks, or if heads are clipped after their norm.
bool norms_in_rope(const ModelSpec& m, int64_t tp);

}  // namespace moebius

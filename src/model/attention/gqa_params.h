// The parameters of grouped-query attention on a rank: names, shapes and the parts that tp splits.
// prefix is that of the layer's names, as "model.layers.0.self_attn".
#pragma once

#include "model/layer_context.h"

namespace moebius {

// One matrix of the rows of q, k and v of this rank's heads, so that the three projections
// are one product.
ParamSpec qkv_spec(const LayerContext& c, const std::string& prefix);
ParamSpec qkv_bias_spec(const LayerContext& c, const std::string& prefix);
ParamSpec o_spec(const LayerContext& c, const std::string& prefix);
// Added to a rank's own rows of the sum over tp, so every rank has it whole.
ParamSpec o_bias_spec(const LayerContext& c, const std::string& prefix);
// One number a head, f32 as scores are.
ParamSpec sinks_spec(const LayerContext& c, const std::string& prefix);
// The norm of q or k. Per head: all heads share it and every rank has it whole. Over all heads:
// split as they are.
ParamSpec qk_norm_spec(const LayerContext& c, const std::string& name, int64_t heads);

}  // namespace moebius

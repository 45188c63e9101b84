// The parameters of a rank's experts: their names, shapes, and the parts that ep and etp split.
// prefix: the beginning of their names, such as "model.layers.0.mlp".
#pragma once

#include "model/layer_context.h"

namespace moebius {

// Throws Error{usage} with the equation unless ep divides the experts and etp their inner width.
void check_expert_degrees(const ModelSpec& model, const MeshShape& mesh);

// e: experts of this rank. F: the inner width of this rank's shard.
ParamSpec w1_spec(const LayerContext& c, const std::string& prefix);  // [e, 2F, D]: per expert, gate rows, then up rows
ParamSpec w2_spec(const LayerContext& c, const std::string& prefix);  // [e, D, F]
ParamSpec b1_spec(const LayerContext& c, const std::string& prefix);  // [e, 2F]
// [e, C]. The outputs of the etp shards of an expert are summed, so each shard has some columns of the bias. etp need
// not divide the columns.
ParamSpec b2_spec(const LayerContext& c, const std::string& prefix);
int64_t first_b2_column(const LayerContext& c);

// Declares weights of experts that compute at most max_tokens tokens of a rank at a time. The products that compute
// their gradients may add these to the sums of gradients (optimizer.fuse_grad). They cannot if a micro-batch is
// computed in chunks, which has several products for a gradient, or with quantised operands, whose kernel writes f32.
const Param& declare_expert_weights(const LayerContext& c, ParamSpec spec, int64_t max_tokens);

}  // namespace moebius

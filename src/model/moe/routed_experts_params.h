// The parameters of the experts on a rank: names, shapes and the parts that ep and etp split.
// prefix is that of the layer's names, as "model.layers.0.mlp".
#pragma once

#include "model/layer_context.h"

namespace moebius {

// Error{usage} with the equation unless ep divides the experts and etp their inner width.
void check_expert_degrees(const ModelSpec& model, const MeshShape& mesh);

// e experts here, F of a shard.
ParamSpec w1_spec(const LayerContext& c, const std::string& prefix);  // [e, 2F, D]: of each expert gate rows, then up
ParamSpec w2_spec(const LayerContext& c, const std::string& prefix);  // [e, D, F]
ParamSpec b1_spec(const LayerContext& c, const std::string& prefix);  // [e, 2F]
// [e, C]. The outputs of a token's expert shards are summed, so each shard has its share of the
// columns of the bias. etp need not divide the columns.
ParamSpec b2_spec(const LayerContext& c, const std::string& prefix);
int64_t first_b2_column(const LayerContext& c);

}  // namespace moebius

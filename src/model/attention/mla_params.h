// The parameters of latent attention (mla.h).
#pragma once

#include <string>

#include "model/layer_context.h"

namespace moebius {

// A matrix [out, in] that is whole on every rank. A rank adds the gradient of its own rows.
ParamSpec whole_matrix(const LayerContext& c, const std::string& name, int64_t out, int64_t in);
// Returns the same for one row: a norm's weight or a bias.
ParamSpec whole_row(const LayerContext& c, const std::string& name, int64_t width, ParamInit init);
// A matrix that is split along its dimension of heads, dim; this rank has one block.
ParamSpec heads_matrix(const LayerContext& c, const std::string& name, const Shape& whole, int dim);
// Returns the last projection of the query: it reads the query's latent, or x where there is none.
ParamSpec query_up(const LayerContext& c, const std::string& prefix);

}  // namespace moebius

// The quantisation of the products of a parameter of which a layer multiplies some rows at a time.
#pragma once

#include "model/layers/precision_of.h"

namespace moebius {

// Returns precision_of(c, spec) for products with the rows from `first` on of a matrix that is whole on this rank.
// Their dy has these columns of the whole one, by which nvfp4 draws. Throws as precision_of() does.
ProductPrecision precision_of_rows(const LayerContext& c, const ParamSpec& spec, int64_t first);

}  // namespace moebius

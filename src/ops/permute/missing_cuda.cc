// The CUDA backend of these ops in a build without it.
#include "ops/backends.h"
#include "ops/backends_moe.h"

namespace moebius::cuda {

void combine(Stream&, const Combine&) { missing_cuda("combine"); }
void pairs_to_rows(Stream&, const PairsToRows&) { missing_cuda("pairs_to_rows"); }
void rows_to_pairs(Stream&, const RowsToPairs&) { missing_cuda("rows_to_pairs"); }

}  // namespace moebius::cuda

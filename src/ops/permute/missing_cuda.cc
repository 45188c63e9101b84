// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cuda {

void combine(Stream&, const Combine&) { missing_cuda("combine"); }
void gather_rows(Stream&, const GatherRows&) { missing_cuda("gather_rows"); }
void pairs_to_rows(Stream&, const PairsToRows&) { missing_cuda("pairs_to_rows"); }
void rows_to_pairs(Stream&, const RowsToPairs&) { missing_cuda("rows_to_pairs"); }
void index_rows(Stream&, const IndexRows&) { missing_cuda("index_rows"); }
void index_routes(Stream&, const IndexRoutes&) { missing_cuda("index_routes"); }
void index_arrivals(Stream&, const IndexArrivals&) { missing_cuda("index_arrivals"); }
void local_pairs(Stream&, const LocalPairs&) { missing_cuda("local_pairs"); }
void local_pairs_to_rows(Stream&, const LocalPairsToRows&) { missing_cuda("local_pairs_to_rows"); }
void rows_to_all_pairs(Stream&, const RowsToAllPairs&) { missing_cuda("rows_to_all_pairs"); }

}  // namespace moebius::cuda

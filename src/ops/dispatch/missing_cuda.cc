// Replaces the CUDA backend of these ops in a build without it.
#include "ops/dispatch/dispatch_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void destinations(Stream&, const Destinations&) { missing_cuda("destinations"); }
void dispatch_places(Stream&, const DispatchPlaces&) { missing_cuda("dispatch_places"); }
void push_rows(Stream&, const PushRows&) { missing_cuda("push_rows"); }
void contiguous_places(Stream&, const ContiguousPlaces&) { missing_cuda("contiguous_places"); }
void push_to_all(Stream&, const PushToAll&) { missing_cuda("push_to_all"); }
void sorted_places(Stream&, const SortedPlaces&) { missing_cuda("sorted_places"); }
void spread_rows(Stream&, const SpreadRows&) { missing_cuda("spread_rows"); }
void pack_routes(Stream&, const PackRoutes&) { missing_cuda("pack_routes"); }
void select_routes(Stream&, const SelectRoutes&) { missing_cuda("select_routes"); }
void push_routes(Stream&, const PushRoutes&) { missing_cuda("push_routes"); }
void return_sums(Stream&, const ReturnSums&) { missing_cuda("return_sums"); }
void return_pairs(Stream&, const ReturnPairs&) { missing_cuda("return_pairs"); }
void sum_pairs(Stream&, const SumPairs&) { missing_cuda("sum_pairs"); }
void part_rows(Stream&, const PartRows&) { missing_cuda("part_rows"); }

}  // namespace moebius::cuda

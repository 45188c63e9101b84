// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct Combine;
struct GatherRows;
struct PairsToRows;
struct RowsToPairs;
struct IndexRows;
struct IndexRoutes;
struct IndexArrivals;
struct LocalPairs;
struct LocalPairsToRows;
struct RowsToAllPairs;

namespace cpu {
void combine(Stream& s, const Combine& a);
void gather_rows(Stream& s, const GatherRows& a);
void pairs_to_rows(Stream& s, const PairsToRows& a);
void rows_to_pairs(Stream& s, const RowsToPairs& a);
void index_rows(Stream& s, const IndexRows& a);
void index_routes(Stream& s, const IndexRoutes& a);
void index_arrivals(Stream& s, const IndexArrivals& a);
void local_pairs(Stream& s, const LocalPairs& a);
void local_pairs_to_rows(Stream& s, const LocalPairsToRows& a);
void rows_to_all_pairs(Stream& s, const RowsToAllPairs& a);
}  // namespace cpu

namespace cuda {
void combine(Stream& s, const Combine& a);
void gather_rows(Stream& s, const GatherRows& a);
void pairs_to_rows(Stream& s, const PairsToRows& a);
void rows_to_pairs(Stream& s, const RowsToPairs& a);
void index_rows(Stream& s, const IndexRows& a);
void index_routes(Stream& s, const IndexRoutes& a);
void index_arrivals(Stream& s, const IndexArrivals& a);
void local_pairs(Stream& s, const LocalPairs& a);
void local_pairs_to_rows(Stream& s, const LocalPairsToRows& a);
void rows_to_all_pairs(Stream& s, const RowsToAllPairs& a);
}  // namespace cuda

}  // namespace moebius

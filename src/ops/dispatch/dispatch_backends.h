// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct Destinations;
struct DispatchPlaces;
struct ContiguousPlaces;
struct PushRows;
struct PushToAll;
struct SortedPlaces;
struct SpreadRows;
struct PackRoutes;
struct SelectRoutes;
struct PushRoutes;
struct ReturnSums;
struct ReturnPairs;
struct SumPairs;
struct PartRows;

namespace cpu {
void destinations(Stream& s, const Destinations& a);
void dispatch_places(Stream& s, const DispatchPlaces& a);
void contiguous_places(Stream& s, const ContiguousPlaces& a);
void push_rows(Stream& s, const PushRows& a);
void push_to_all(Stream& s, const PushToAll& a);
void sorted_places(Stream& s, const SortedPlaces& a);
void spread_rows(Stream& s, const SpreadRows& a);
void pack_routes(Stream& s, const PackRoutes& a);
void select_routes(Stream& s, const SelectRoutes& a);
void push_routes(Stream& s, const PushRoutes& a);
void return_sums(Stream& s, const ReturnSums& a);
void return_pairs(Stream& s, const ReturnPairs& a);
void sum_pairs(Stream& s, const SumPairs& a);
void part_rows(Stream& s, const PartRows& a);
}  // namespace cpu

namespace cuda {
void destinations(Stream& s, const Destinations& a);
void dispatch_places(Stream& s, const DispatchPlaces& a);
void contiguous_places(Stream& s, const ContiguousPlaces& a);
void push_rows(Stream& s, const PushRows& a);
void push_to_all(Stream& s, const PushToAll& a);
void sorted_places(Stream& s, const SortedPlaces& a);
void spread_rows(Stream& s, const SpreadRows& a);
void pack_routes(Stream& s, const PackRoutes& a);
void select_routes(Stream& s, const SelectRoutes& a);
void push_routes(Stream& s, const PushRoutes& a);
void return_sums(Stream& s, const ReturnSums& a);
void return_pairs(Stream& s, const ReturnPairs& a);
void sum_pairs(Stream& s, const SumPairs& a);
void part_rows(Stream& s, const PartRows& a);
}  // namespace cuda

}  // namespace moebius

// What each device implements of moving and indexing rows. Arguments are checked before these are called.
#pragma once

#include "core/device.h"

namespace moebius {

struct GatherRows;
struct IndexRows;
struct IndexArrivals;

namespace cpu {
void gather_rows(Stream& s, const GatherRows& a);
void index_rows(Stream& s, const IndexRows& a);
void index_arrivals(Stream& s, const IndexArrivals& a);
}  // namespace cpu

namespace cuda {
void gather_rows(Stream& s, const GatherRows& a);
void index_rows(Stream& s, const IndexRows& a);
void index_arrivals(Stream& s, const IndexArrivals& a);
}  // namespace cuda

}  // namespace moebius

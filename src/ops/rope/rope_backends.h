// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct RopeTable;
struct RopeFwd;
struct RopeBwd;

namespace cpu {
void rope_table(Stream& s, const RopeTable& a);
void rope_fwd(Stream& s, const RopeFwd& a);
void rope_bwd(Stream& s, const RopeBwd& a);
}  // namespace cpu

namespace cuda {
void rope_table(Stream& s, const RopeTable& a);
void rope_fwd(Stream& s, const RopeFwd& a);
void rope_bwd(Stream& s, const RopeBwd& a);
}  // namespace cuda

}  // namespace moebius

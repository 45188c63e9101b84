// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct SwigluFwd;
struct SwigluBwd;

namespace cpu {
void swiglu_fwd(Stream& s, const SwigluFwd& a);
void swiglu_bwd(Stream& s, const SwigluBwd& a);
}  // namespace cpu

namespace cuda {
void swiglu_fwd(Stream& s, const SwigluFwd& a);
void swiglu_bwd(Stream& s, const SwigluBwd& a);
}  // namespace cuda

}  // namespace moebius

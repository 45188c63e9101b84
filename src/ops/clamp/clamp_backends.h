// The functions that each device implements for these ops. The arguments have been checked, the
// limit is a value of the dtype, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct ClampFwd;
struct ClampBwd;

namespace cpu {
void clamp_fwd(Stream& s, const ClampFwd& a);
void clamp_bwd(Stream& s, const ClampBwd& a);
}  // namespace cpu

namespace cuda {
void clamp_fwd(Stream& s, const ClampFwd& a);
void clamp_bwd(Stream& s, const ClampBwd& a);
}  // namespace cuda

}  // namespace moebius

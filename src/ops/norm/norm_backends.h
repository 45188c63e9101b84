// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct RmsNormFwd;
struct RmsNormBwd;

namespace cpu {
void rms_norm_fwd(Stream& s, const RmsNormFwd& a);
void rms_norm_bwd(Stream& s, const RmsNormBwd& a);
}  // namespace cpu

namespace cuda {
void rms_norm_fwd(Stream& s, const RmsNormFwd& a);
void rms_norm_bwd(Stream& s, const RmsNormBwd& a);
}  // namespace cuda

}  // namespace moebius

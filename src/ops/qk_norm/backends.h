// What each device implements of this op. Arguments are checked before these are called, and there is work to do.
#pragma once

#include "core/device.h"

namespace moebius {

struct QkNormFwd;
struct QkNormBwd;

namespace cpu {
void qk_norm_fwd(Stream& s, const QkNormFwd& a);
void qk_norm_bwd(Stream& s, const QkNormBwd& a);
}  // namespace cpu

namespace cuda {
void qk_norm_fwd(Stream& s, const QkNormFwd& a);
void qk_norm_bwd(Stream& s, const QkNormBwd& a);
}  // namespace cuda

}  // namespace moebius

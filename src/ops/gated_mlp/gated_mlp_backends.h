// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct GatedUp;
struct DGatedDown;

namespace cpu {
void gated_up(Stream& s, const GatedUp& a);
void d_gated_down(Stream& s, const DGatedDown& a);
}  // namespace cpu

namespace cuda {
void gated_up(Stream& s, const GatedUp& a);
void d_gated_down(Stream& s, const DGatedDown& a);
}  // namespace cuda

}  // namespace moebius

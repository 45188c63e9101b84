// The functions that each device implements for this op. The arguments have been checked, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct DrawTokens;

namespace cpu {
void draw_tokens(Stream& s, const DrawTokens& a);
}  // namespace cpu

namespace cuda {
void draw_tokens(Stream& s, const DrawTokens& a);
}  // namespace cuda

}  // namespace moebius

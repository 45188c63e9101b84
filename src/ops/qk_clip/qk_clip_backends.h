// The functions that each device implements for these ops. The arguments have been checked, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct MaxOverRanks;
struct QkClip;

namespace cpu {
void max_over_ranks(Stream& s, const MaxOverRanks& a);
void qk_clip(Stream& s, const QkClip& a);
}  // namespace cpu

namespace cuda {
void max_over_ranks(Stream& s, const MaxOverRanks& a);
void qk_clip(Stream& s, const QkClip& a);
}  // namespace cuda

}  // namespace moebius

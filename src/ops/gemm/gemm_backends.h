// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct Gemm;

namespace cpu {
void gemm(Stream& s, const Gemm& a);
}  // namespace cpu

namespace cuda {
void gemm(Stream& s, const Gemm& a);
}  // namespace cuda

}  // namespace moebius

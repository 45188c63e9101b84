// The function that CUDA implements for router_logits_few; the CPU computes few rows in the same way as many. Arguments
// were checked, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct RouterLogitsFwd;

namespace cuda {
void router_logits_few(Stream& s, const RouterLogitsFwd& a);
}  // namespace cuda

}  // namespace moebius

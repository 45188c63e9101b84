// The backend of ops/experts/few_rows.h. The arguments have been checked, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct ExpertDown;

namespace cuda {
void expert_down_after_up(Stream& s, const ExpertDown& a);
}  // namespace cuda

}  // namespace moebius

// The function that each device implements for these ops. The arguments have been checked, and there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct AddScaled;

namespace cpu {
void add_scaled(Stream& s, const AddScaled& a);
}  // namespace cpu

namespace cuda {
void add_scaled(Stream& s, const AddScaled& a);
}  // namespace cuda

}  // namespace moebius

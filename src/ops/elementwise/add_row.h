// Adding one row to every row of a table.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// y[s,:] += row[0,:].  f32.
void add_row(Stream& s, Tensor y_SD, Tensor row_1D);

}  // namespace moebius

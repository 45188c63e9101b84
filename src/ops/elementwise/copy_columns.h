// Columns of one matrix into columns of another.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// to[t, to_first + j] = from[t, from_first + j] for j < count. Any dtype, the same rows.
struct CopyColumns {
  Tensor to_TA;    // out
  Tensor from_TB;  // in
  int64_t to_first = 0, from_first = 0, count = 0;
};
void copy_columns(Stream& s, const CopyColumns& a);

namespace cpu {
void copy_columns(Stream& s, const CopyColumns& a);
}
namespace cuda {
void copy_columns(Stream& s, const CopyColumns& a);
}

}  // namespace moebius

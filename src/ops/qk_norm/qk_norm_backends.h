// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct QkNormSums;
struct QkNormBlockFwd;
struct QkNormBlockBwd;

namespace cpu {
void qk_norm_sums(Stream& s, const QkNormSums& a);
void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a);
void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a);
}  // namespace cpu

namespace cuda {
void qk_norm_sums(Stream& s, const QkNormSums& a);
void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a);
void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a);
}  // namespace cuda

}  // namespace moebius

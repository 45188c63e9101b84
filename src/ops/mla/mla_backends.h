// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include "device/device.h"

namespace moebius {

struct RotateHeads;
struct LatentKvFwd;
struct LatentKvBwd;

namespace cpu {
void rotate_heads(Stream& s, const RotateHeads& a);
void latent_kv_fwd(Stream& s, const LatentKvFwd& a);
void latent_kv_bwd(Stream& s, const LatentKvBwd& a);
}  // namespace cpu

namespace cuda {
void rotate_heads(Stream& s, const RotateHeads& a);
void latent_kv_fwd(Stream& s, const LatentKvFwd& a);
void latent_kv_bwd(Stream& s, const LatentKvBwd& a);
}  // namespace cuda

}  // namespace moebius

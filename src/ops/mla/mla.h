// The steps of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) between its
// products. One rotates a part of each head. The other builds keys from a part of each head and a
// part that all heads share.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Rotates the last r columns of each head by the position of their row, in place.
//
// cos_sin is the table of ops/rope, of width r. Pairs are (2i, 2i + 1) when interleaved, else (i, i
// + r/2); frequency i belongs to pair i in both. With transposed the transpose is applied, which is
// what the backward pass does to gradients. x is f32 or bf16; the maths is in f32 and rounded once.
struct RotateHeads {
  Tensor x_THw;              // inout
  Tensor pos_T, cos_sin_Pr;  // in; pos i32
  bool interleaved = false;
  bool transposed = false;
};
void rotate_heads(Stream& s, const RotateHeads& a);
Cost cost(const RotateHeads& a);

// k[t,h] = [kv[t,h,:n] | k_rope[t]]
// v[t,h] = kv[t,h,n:]
//
// All have one dtype, f32 or bf16.
struct LatentKvFwd {
  Tensor k_THd, v_THv;       // out; d = n + r
  Tensor kv_THw, k_rope_Tr;  // in;  w = n + v
};
void latent_kv_fwd(Stream& s, const LatentKvFwd& a);
Cost cost(const LatentKvFwd& a);

// dkv[t,h] = [dk[t,h,:n] | dv[t,h]]
// dk_rope[t] = sum over h, in order, of dk[t,h,n:]
//
// The sum is in f32 and rounded once.
struct LatentKvBwd {
  Tensor dkv_THw, dk_rope_Tr;  // out
  Tensor dk_THd, dv_THv;       // in
};
void latent_kv_bwd(Stream& s, const LatentKvBwd& a);
Cost cost(const LatentKvBwd& a);

}  // namespace moebius

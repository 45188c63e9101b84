// What multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) does between its products: it rotates a
// part of each head, and puts keys together from a part of each head and one that all heads share.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The last r columns of each head are rotated by the position of their row, in place; cos_sin is ops/rope's table
// of width r. Pairs are (2i, 2i + 1) when interleaved, else (i, i + r/2); frequency i belongs to pair i of both.
// With `transposed` the transpose is applied, which is what the backward does to gradients.
// x f32 or bf16, maths in f32, rounded once.
struct RotateHeads {
  Tensor x_THw;              // inout
  Tensor pos_T, cos_sin_Pr;  // in; pos i32
  bool interleaved = false;
  bool transposed = false;
};
void rotate_heads(Stream& s, const RotateHeads& a);
Cost cost(const RotateHeads& a);

// Row h of kv is [n columns of k | v]. One dtype, f32 or bf16.
//   k[t,h] = [kv[t,h,:n] | k_rope[t]]
//   v[t,h] = kv[t,h,n:]
struct LatentKvFwd {
  Tensor k_THd, v_THv;       // out; d = n + r
  Tensor kv_THw, k_rope_Tr;  // in;  w = n + v
};
void latent_kv_fwd(Stream& s, const LatentKvFwd& a);
Cost cost(const LatentKvFwd& a);

// dkv[t,h] = [dk[t,h,:n] | dv[t,h]]
// dk_rope[t] = sum over h, in order, of dk[t,h,n:]  (in f32, rounded once)
struct LatentKvBwd {
  Tensor dkv_THw, dk_rope_Tr;  // out
  Tensor dk_THd, dv_THv;       // in
};
void latent_kv_bwd(Stream& s, const LatentKvBwd& a);
Cost cost(const LatentKvBwd& a);

}  // namespace moebius

// Decoding: attention of one new token of each of several sequences, with a key-value cache. Positions are in device
// memory, so that one CUDA graph serves for all positions.
// On a GPU the keys of a sequence are split into pieces that are computed in parallel (Flash-Decoding, Dao et al.,
// 2023). The split is the same for any number of sequences, and pieces are merged in order, so the bits of a sequence
// do not depend on the others.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Row n is the token at position p = pos[n] of sequence q = sequence[n]. Row q max_tokens + j of the cache is position
// j of sequence q. The key and value of row n are written to position p, and its query attends to the positions [0, p],
// or (p - window, p] if window > 0.
//   o = softmax(scale q k^T) v,   lse[n,h] = log sum exp(scale q k^T)     (natural, f32)
//
// Query head h reads kv head h / (H/G). All tensors have one dtype, f32 or bf16. Scores, softmax and sums are in f32.
// REQUIRES: 0 <= pos[n] < max_tokens; the rows are of different sequences.
struct CachedAttentionFwd {
  Tensor o_NHd, lse_NH;        // out
  Tensor k_UGd, v_UGd;         // inout: the cache; U = sequences * max_tokens; d at most 256 on a GPU
  Tensor q_NHd, k_NGd, v_NGd;  // in: of the new tokens
  Tensor pos_N, sequence_N;    // in, i32
  int64_t max_tokens = 0;      // rows of a sequence in the cache
  int64_t window = 0;
  float scale = 1.0f;
  Tensor scratch;  // scratch_bytes(a, s) bytes of any dtype
  static int64_t scratch_bytes(const CachedAttentionFwd& a, const Stream& s);
};
void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a);
Cost cost(const CachedAttentionFwd& a);  // an upper bound: every sequence has max_tokens

}  // namespace moebius

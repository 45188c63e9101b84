// Attention of one new token of each of several sequences, whose earlier keys and values are cached.
// Positions are in the device's memory, so that a CUDA graph of a token serves for every later one.
// On a GPU, the keys of a sequence are cut into pieces that are computed beside each other, as in
// Flash-Decoding (Dao et al., 2023). The pieces are the same whatever else is computed, and they are
// merged in order, so a sequence does not depend on the others to the last bit.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Row n is the token at position p = pos[n] of sequence q = sequence[n]. The rows q max_tokens + j of
// the cache belong to the sequence's positions j. Row n's key and value are written there at j = p,
// and the query of row n sees j in [0, p], or (p - window, p] when window > 0.
//   o = softmax(scale q k^T) v,   lse[n,h] = log sum exp(scale q k^T)     (natural, f32)
//
// Query head h reads kv head h / (H/G). Tensors are f32 or bf16 alike. Scores, softmax and sums are in
// f32. REQUIRES: 0 <= pos[n] < max_tokens; rows are of different sequences.
struct CachedAttentionFwd {
  Tensor o_NHd, lse_NH;        // out
  Tensor k_UGd, v_UGd;         // inout: the cache; U = sequences * max_tokens; d at most 256 on a GPU
  Tensor q_NHd, k_NGd, v_NGd;  // in: of the new tokens
  Tensor pos_N, sequence_N;    // in, i32
  int64_t max_tokens = 0;      // of a sequence
  int64_t window = 0;
  float scale = 1.0f;
  // Scratch bytes, any dtype; how many depends on the device that s is or stands for.
  Tensor scratch;
  static int64_t scratch_bytes(const CachedAttentionFwd& a, const Stream& s);
};
void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a);
Cost cost(const CachedAttentionFwd& a);  // at most: as if every sequence were full

}  // namespace moebius

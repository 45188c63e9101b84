// Causal grouped-query attention, computed by tiles of queries with a running softmax (Dao et al.,
// arXiv 2205.14135): no [S, S] matrix is kept.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The kernels that compute a call on a GPU. Both give the same results within rounding.
enum class AttentionKernels : uint8_t {
  chosen,  // those that were faster for the shape when they were measured (attention_choice.h)
  own,
  cudnn,  // Throws Error{usage} where cuDNN does not take the call.
};

// There are B sequences. Query row b*Sq + i is at position p = Skv - Sq + i of sequence b, whose
// keys are the rows b*Skv + j with j in [0, Skv).
//   o = softmax(scale q k^T) v,   lse[t,h] = log sum exp(scale q k^T)     (natural, f32)
//
// A query sees the keys with doc_start[b*Sq + i] <= j <= p, and j > p - window when window > 0.
// Query head h reads kv head h / (H/G). Rows of v and o are dv wide, where those of q and k are d
// wide; on a GPU both are at most 256. q, k, v and o are f32 or bf16 alike. Scores, softmax and sums
// are in f32. Probabilities are rounded to the dtype for the product with v.
//
// A part is attention over some of the keys. The queries of a sequence are then at positions q_first
// + i and its keys at kv_first + j; doc_start is a position too. A query that sees no key has o = 0
// and lse = -inf. attention_merge.h merges the results of all parts. The backward pass of a part
// takes o and lse of the whole. It gives the part's share of dq, and all of dk and dv that these
// queries cause.
struct AttentionFwd {
  Tensor o_THd, lse_TH;        // out; T = B Sq; o is [T, H, dv]
  Tensor q_THd, k_UGd, v_UGd;  // in;  U = B Skv; v is [U, G, dv]
  Tensor doc_start_T;          // in, i32, empty: 0; REQUIRES: does not decrease within a sequence
  int64_t batch = 1;
  int64_t window = 0;
  float scale = 1.0f;
  bool is_part = false;
  int64_t q_first = 0, kv_first = 0;
  AttentionKernels kernels = AttentionKernels::chosen;
  // Scratch bytes, any dtype; how many depends on the device that s is or stands for.
  Tensor scratch;
  static int64_t scratch_bytes(const AttentionFwd& a, const Stream& s);
};
void attention_fwd(Stream& s, const AttentionFwd& a);
Cost cost(const AttentionFwd& a);

// Computes dq, dk and dv from do. REQUIRES: Sq == Skv, unless this is a part. The result is
// deterministic: the sums of each kv head run over its query heads and tiles in order.
struct AttentionBwd {
  Tensor dq_THd, dk_TGd, dv_TGd;                                   // out
  Tensor do_THd, o_THd, lse_TH, q_THd, k_TGd, v_TGd, doc_start_T;  // in
  int64_t batch = 1;
  int64_t window = 0;
  float scale = 1.0f;
  bool is_part = false;
  int64_t q_first = 0, kv_first = 0;
  AttentionKernels kernels = AttentionKernels::chosen;
  Tensor scratch;
  static int64_t scratch_bytes(const AttentionBwd& a, const Stream& s);
};
void attention_bwd(Stream& s, const AttentionBwd& a);
Cost cost(const AttentionBwd& a);

}  // namespace moebius

// Causal grouped-query attention, computed by tiles of queries with a running softmax (Dao et al.,
// arXiv 2205.14135): no [S, S] matrix is kept.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// The kernels that compute a call on a GPU. Both give the same results within rounding.
enum class AttentionKernels : uint8_t {
  chosen,  // on a Hopper GPU the faster ones, elsewhere cuDNN's for most calls that it supports (attention_choice.h)
  own,     // Moebius's kernels
  cudnn,   // cuDNN's; Error{usage} if cuDNN cannot compute the call
};

// The Hopper kernels that compute a backward pass. All give the same results within rounding.
enum class AttentionBwdPath : uint8_t {
  chosen,      // the faster ones for the shape, by the table of attention_slices.h
  one_kernel,  // dq, dk and dv in one kernel
  kept_ds,     // dk and dv, then dq from the gradients of the scores, which are kept in scratch
  recomputed,  // dk and dv, then dq from recomputed scores
};

// There are B sequences. Query row b*Sq + i is at position p = Skv - Sq + i of sequence b, whose
// keys are the rows b*Skv + j with j in [0, Skv).
//   o = softmax(scale q k^T) v,   lse[t,h] = log sum exp(scale q k^T)     (natural, f32)
//
// A query attends to the keys j with doc_start[b*Sq + i] <= j <= p, and j > p - window if window > 0.
// Query head h reads kv head h / (H/G). The head width is d for q and k, and dv for v and o; on a GPU both are at most
// 256. q, k, v and o have one dtype, f32 or bf16. Scores, softmax and sums are in f32; probabilities are rounded to the
// dtype for the product with v.
//
// With is_part this is attention over some of the keys (context parallelism). The queries of a sequence are then at
// positions q_first + i, its keys at kv_first + j, and doc_start is a position too. A query without keys gets o of 0
// and lse of -inf. attention_merge.h merges the results of all parts. The backward of a part reads o and lse of the
// merged result; it gives the part's share of dq, and the contribution of these queries to dk and dv.
struct AttentionFwd {
  Tensor o_THd, lse_TH;  // out; T = B Sq; o is [T, H, dv]
  // inout f32 [H], or empty: max_logit[h] = max(max_logit[h], the largest scale q k^T of head h), over the keys that
  // queries attend to. REQUIRES: at least 0. On a GPU the scores are recomputed for it.
  Tensor max_logit_H = {};
  Tensor q_THd, k_UGd, v_UGd;  // in;  U = B Skv; v is [U, G, dv]
  Tensor doc_start_T;          // in, i32, empty: all 0; REQUIRES: non-decreasing within a sequence
  int64_t batch = 1;
  int64_t window = 0;
  float scale = 1.0f;
  bool is_part = false;
  int64_t q_first = 0, kv_first = 0;
  AttentionKernels kernels = AttentionKernels::chosen;
  Tensor scratch;  // scratch_bytes(a, s) bytes of any dtype
  static int64_t scratch_bytes(const AttentionFwd& a, const Stream& s);
};
void attention_fwd(Stream& s, const AttentionFwd& a);
Cost cost(const AttentionFwd& a);

// Computes dq, dk and dv from do. The result is deterministic: the order of every sum follows from the shape, and with
// owns_gpu from the number of multiprocessors too.
// REQUIRES: Sq == Skv, unless is_part.
struct AttentionBwd {
  Tensor dq_THd, dk_TGd, dv_TGd;                                   // out
  Tensor do_THd, o_THd, lse_TH, q_THd, k_TGd, v_TGd, doc_start_T;  // in
  int64_t batch = 1;
  int64_t window = 0;
  float scale = 1.0f;
  bool is_part = false;
  int64_t q_first = 0, kv_first = 0;
  AttentionKernels kernels = AttentionKernels::chosen;
  // A value other than `chosen` is for tests and benchmarks. REQUIRES then: `kernels` is own.
  // Throws Error{usage} if the Hopper kernels do not support the call, or not by this path.
  AttentionBwdPath path = AttentionBwdPath::chosen;
  // No other kernel of this process runs on the GPU at the same time. Long causal calls may then sum dk and dv in
  // another order (alternating_set() of attention_slices.h), which takes longer where a multiprocessor is not free.
  bool owns_gpu = false;
  Tensor scratch;
  static int64_t scratch_bytes(const AttentionBwd& a, const Stream& s);
};
void attention_bwd(Stream& s, const AttentionBwd& a);
Cost cost(const AttentionBwd& a);

}  // namespace moebius

// The embedding look-up and the language-model loss.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// x[t,:] = w[token[t],:]
//
// REQUIRES: 0 <= token < V. The host checks this where it reads tokens, and the op asserts it.
// With is_block the table is one of several blocks: w has the rows of the tokens [first, first + V), and x of other
// tokens is 0.
struct EmbeddingFwd {
  Tensor x_TD;           // out
  Tensor token_T, w_VD;  // in; token i32
  bool is_block = false;
  int64_t first = 0;
};
void embedding_fwd(Stream& s, const EmbeddingFwd& a);
Cost cost(const EmbeddingFwd& a);

// dw[token[t],:] += dx[t,:]  in the order of t
//
// dw is f32. With is_block, tokens of other blocks add nothing.
struct EmbeddingBwd {
  Tensor dw_VD;           // inout
  Tensor scratch;         // u8 [scratch_bytes], may be empty where that is 0
  Tensor dx_TD, token_T;  // in
  bool is_block = false;
  int64_t first = 0;
  static int64_t scratch_bytes(const EmbeddingBwd& a, const Stream& s);
};
void embedding_bwd(Stream& s, const EmbeddingBwd& a);
Cost cost(const EmbeddingBwd& a);

// logits = x w^T     (f32)
// loss[t] = weight[t] * (logsumexp(logits[t]) - logits[t, target[t]])
//
// With gradients (dx given) it also computes the derivative of  scale * sum over t of loss[t]:
//   dlogits = scale * weight * (softmax - onehot),  dx = dlogits w (out),  dw += dlogits^T x (f32)
//
// The op works on chunks of tokens and never stores all logits. x and w have one dtype, f32 or bf16;
// dlogits is rounded to that dtype for the products. A token of weight 0 has loss 0 and no
// gradient, whatever its target.
struct LmLoss {
  Tensor loss_T;                 // out, f32
  Tensor dx_TD, dw_VD;           // out, inout; both empty: no gradients; dw alone empty: of x alone
  Tensor logits_CV, dlogits_CV;  // scratch: f32 and x's dtype, C = chunk(T, V, s); dlogits empty without gradients
  Tensor x_TD, w_VD, target_T, weight_T;  // in; target i32, weight f32
  Tensor scale_1;  // in f32; if given, read instead of scale, so that each replay of a CUDA graph reads a new value
  float scale = 1.0f;
  static int64_t chunk(int64_t num_tokens, int64_t vocab, DeviceKind device);
  static int64_t chunk(int64_t num_tokens, int64_t vocab, const Stream& s);  // on the device that s is for
};
void lm_loss(Stream& s, const LmLoss& a);
Cost cost(const LmLoss& a);

}  // namespace moebius

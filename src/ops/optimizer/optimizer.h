// AdamW and SGD over flat ranges of parameters, and the global gradient norm that clips gradients.
// Each takes all tensors of a model at once: on a GPU one kernel serves dozens of them.
#pragma once

#include <span>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// sum[0] += sum of x^2 of each tensor, one tensor after the other
//
// The sum is in double, over fixed chunks in order. It does not depend on how many tensors a call
// has. partial is f64 scratch of shape [num_partials(x)].
struct SumSquares {
  Tensor sum_1;               // inout f64
  Tensor partial_P;           // scratch f64
  std::span<const Tensor> x;  // in f32 [n]
  static int64_t num_partials(std::span<const Tensor> x);
  static int64_t num_partials(const Tensor& x);  // of these, one after the other
};
void sum_squares(Stream& s, const SumSquares& a);
Cost cost(const SumSquares& a);

// norm[0] = sqrt(sum_squares[0])
// scale[0] = min(1, clip / (norm[0] + 1e-6)),  or 1 without clipping (clip == 0)
//
// norm and scale are f32 [1]. A norm that is not finite in f32 gives a scale of NaN; adamw and
// sgd then change nothing.
struct ClipScale {
  Tensor norm_1, scale_1;  // out f32
  Tensor sum_squares_1;    // in f64
  float clip = 0.0f;
};
void clip_scale(Stream& s, const ClipScale& a);

// Loshchilov & Hutter, arXiv 1711.05101, as torch.optim.AdamW:
//   g = grad * scale[0];  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   master = master (1 - lr wd) - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
//   param = master rounded to its dtype (param may be the master itself in f32)
//
// grad is not changed. Nothing is written when scale[0] is NaN. The optional lr_and_step_2
// holds lr (rounded to f32) and step in memory and takes the place of the two arguments. So a CUDA
// graph reads them anew at each replay.
struct AdamWTensors {
  Tensor param_n, master_n, m_n, v_n;  // out f32 or bf16, inout f32
  Tensor grad_n;                       // in f32
  float weight_decay = 0;
};
struct AdamW {
  std::span<const AdamWTensors> tensors;
  Tensor scale_1;        // in f32
  Tensor lr_and_step_2;  // in f64 [lr, step], may be empty
  float lr = 0, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
  int64_t step = 1;  // 1-based
};
void adamw(Stream& s, const AdamW& a);
Cost cost(const AdamW& a);

// SGD with momentum (Sutskever et al., ICML 2013, as torch.optim.SGD without dampening), and with the
// decoupled weight decay of arXiv 1711.05101, algorithm 1:
//   g = grad * scale[0];  m = momentum m + g
//   master = master (1 - lr wd) - lr m
//   param = master rounded to its dtype (param may be the master itself in f32)
//
// m is empty in all tensors when momentum is 0. grad, scale and lr_and_step_2 are as in AdamW.
struct SgdTensors {
  Tensor param_n, master_n, m_n;  // out f32 or bf16, inout f32
  Tensor grad_n;                  // in f32
  float weight_decay = 0;
};
struct Sgd {
  std::span<const SgdTensors> tensors;
  Tensor scale_1;        // in f32
  Tensor lr_and_step_2;  // in f64 [lr, step], may be empty
  float lr = 0, momentum = 0;
};
void sgd(Stream& s, const Sgd& a);
Cost cost(const Sgd& a);

}  // namespace moebius

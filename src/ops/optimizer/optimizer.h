// Updates of AdamW and SGD over flat ranges of parameters, and the global gradient norm that clips gradients.
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
  std::span<const Tensor> x;  // in f32 or bf16 [n]
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

// The random bits that round element i of a tensor. They are those of Rng(seed, rounding, step, key)
// for element  first + (begin + i) / run * stride + (begin + i) % run  of the global tensor, so they
// do not depend on the layout. Element i has 64 bits: the low 16 round m, the next 16 v, and the
// next 16 the weight.
struct RoundingDraws {
  uint64_t seed = 0;
  uint32_t key = 0;  // of the global tensor
  int64_t begin = 0, run = 1, stride = 1, first = 0;
};

// An update reads and writes this of one tensor. The value w that is updated is one of these
// (ops/optimizer/rounding.h):
//   master                 f32, and param is rounded from it to nearest even, or is the master itself
//   param and remainder    a bf16 and 16 more bits that together are an f32
//   param alone            bf16, rounded stochastically
// m and v are f32; or bf16 that is rounded stochastically; or u8 codes of 8-bit blocks, m with a sign
// and v without one (core/block_code.h), which are rounded stochastically too. n is then a multiple
// of kCodeBlock, blocks begin at the first element, and all tensors at 16 bytes. The arithmetic is in
// f32 and the same bits in each form.
struct UpdatedTensor {
  Tensor param_n, master_n;  // out f32 or bf16; inout f32, or empty
  Tensor m_n, v_n;           // inout f32, bf16 or u8; empty where the optimizer has none
  Tensor grad_n;             // in f32 or bf16
  float weight_decay = 0;
  Tensor remainder_n = {};   // inout u16, or empty
  RoundingDraws draws = {};  // where something is rounded stochastically
  // inout f32 [n / kCodeBlock], the scales of codes; else empty
  Tensor m_scale_b = {}, v_scale_b = {};
  bool draws_bits() const;  // whether something is
};

// Loshchilov & Hutter, arXiv 1711.05101, as torch.optim.AdamW:
//   g = grad * scale[0];  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w = w (1 - lr wd) - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
//
// grad is not changed. Nothing is written when scale[0] is NaN. The optional lr_and_step_2
// holds lr (rounded to f32) and step in memory and takes the place of the two arguments. So a CUDA
// graph reads them anew at each replay.
struct AdamW {
  std::span<const UpdatedTensor> tensors;
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
//   w = w (1 - lr wd) - lr m
//
// v is empty in all tensors, and m too when momentum is 0. The rest is as in AdamW; the step only
// counts for the draws.
struct Sgd {
  std::span<const UpdatedTensor> tensors;
  Tensor scale_1;        // in f32
  Tensor lr_and_step_2;  // in f64 [lr, step], may be empty
  float lr = 0, momentum = 0;
  int64_t step = 1;  // 1-based
};
void sgd(Stream& s, const Sgd& a);
Cost cost(const Sgd& a);

// sum += grad, or sum = grad; in f32, and rounded to nearest even
//
// With on_host the sum is in host memory, and on a GPU it is bound by the bus, which fewer blocks fill.
struct SumGradient {
  Tensor sum_n;   // inout bf16
  Tensor grad_n;  // in f32
  bool adds = true;
  bool on_host = false;
};
void sum_gradient(Stream& s, const SumGradient& a);

// master = the f32 that weight and remainder make
struct JoinMaster {
  Tensor master_n;               // out f32
  Tensor weight_n, remainder_n;  // in bf16, u16
};
void join_master(Stream& s, const JoinMaster& a);

// weight and remainder of a master
struct SplitMaster {
  Tensor weight_n, remainder_n;  // out bf16, u16; remainder may be empty
  Tensor master_n;               // in f32
};
void split_master(Stream& s, const SplitMaster& a);

}  // namespace moebius

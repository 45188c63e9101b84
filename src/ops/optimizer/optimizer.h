// Multi-tensor AdamW and SGD updates of flat ranges of parameters, and the global gradient norm for clipping. Each call
// takes all tensors of a model; on a GPU one kernel handles dozens of tensors.
#pragma once

#include <span>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// sum[0] += sum of x^2 of each tensor, one tensor after the other
//
// The sum is in f64, over fixed chunks in order, so its bits do not depend on how tensors are divided among calls.
// partial is f64 scratch of shape [num_partials(x)].
struct SumSquares {
  Tensor sum_1;               // inout f64
  Tensor partial_P;           // scratch f64
  std::span<const Tensor> x;  // in f32 or bf16 [n]
  static int64_t num_partials(std::span<const Tensor> x);
  static int64_t num_partials(const Tensor& x);  // partial sums of one tensor
};
void sum_squares(Stream& s, const SumSquares& a);
Cost cost(const SumSquares& a);

// norm[0] = sqrt(sum_squares[0])
// scale[0] = min(1, clip / (norm[0] + 1e-6)),  or 1 without clipping (clip == 0)
//
// norm and scale are f32 [1]. If the norm is not finite in f32, scale is NaN, and adamw() and sgd() change nothing.
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
  uint32_t key = 0;  // key of the global tensor
  int64_t begin = 0, run = 1, stride = 1, first = 0;
};

// The tensors of one parameter in an update. The updated value w is stored in one of these formats
// (ops/optimizer/rounding.h):
//   master                 f32; param is the master rounded to nearest even, or the master itself
//   param and remainder    a bf16 and 16 more bits, which together are an f32
//   param alone            bf16, rounded stochastically
// The moments m and v are f32, bf16 with stochastic rounding, or 8-bit codes (u8, core/block_code.h; m with a sign, v
// without) with stochastic rounding. For codes, n is a multiple of kCodeBlock, blocks begin at the first element, and
// all tensors begin at multiples of 16 bytes. The arithmetic is in f32, with the same bits in each format.
struct UpdatedTensor {
  Tensor param_n, master_n;  // out f32 or bf16; inout f32, or empty
  Tensor m_n, v_n;           // inout f32, bf16 or u8; empty if the optimizer does not have them
  Tensor grad_n;             // in f32 or bf16
  float weight_decay = 0;
  Tensor remainder_n = {};   // inout u16, or empty
  RoundingDraws draws = {};  // used for stochastic rounding
  // inout f32 [n / kCodeBlock], the scales of codes; else empty
  Tensor m_scale_b = {}, v_scale_b = {};
  bool draws_bits() const;  // returns whether anything is rounded stochastically
};

// Loshchilov & Hutter, arXiv 1711.05101, as torch.optim.AdamW:
//   g = grad * scale[0];  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2
//   w = w (1 - lr wd) - lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
//
// grad is not changed. Nothing is written if scale[0] is NaN. If lr_and_step_2 is given, lr (rounded to f32) and step
// are read from it instead of the two arguments, so that each replay of a CUDA graph reads new values.
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
// v is empty in all tensors, and m too if momentum is 0. Otherwise as AdamW; step is only a key of random draws.
struct Sgd {
  std::span<const UpdatedTensor> tensors;
  Tensor scale_1;        // in f32
  Tensor lr_and_step_2;  // in f64 [lr, step], may be empty
  float lr = 0, momentum = 0;
  int64_t step = 1;      // 1-based
  bool reads_lr = true;  // false: of lr_and_step_2 only the step is read, and lr is the argument
};
void sgd(Stream& s, const Sgd& a);
Cost cost(const Sgd& a);

// sum += grad, or sum = grad; in f32, and rounded to nearest even
//
// on_host: sum is in host memory. On a GPU it is then limited by PCIe, and uses fewer blocks.
struct SumGradient {
  Tensor sum_n;   // inout bf16
  Tensor grad_n;  // in f32
  bool adds = true;
  bool on_host = false;
};
void sum_gradient(Stream& s, const SumGradient& a);

// master = the f32 whose high and low halves are weight and remainder (ops/optimizer/rounding.h)
struct JoinMaster {
  Tensor master_n;               // out f32
  Tensor weight_n, remainder_n;  // in bf16, u16
};
void join_master(Stream& s, const JoinMaster& a);

// The inverse of join_master: weight and remainder of a master.
struct SplitMaster {
  Tensor weight_n, remainder_n;  // out bf16, u16; remainder may be empty
  Tensor master_n;               // in f32
};
void split_master(Stream& s, const SplitMaster& a);

}  // namespace moebius

// The products of the gate on CUDA: which of them the tensor cores compute, and their scratch.
// This header is plain C++, since sizes are also needed on machines without a GPU.
//
// An f32 number is the sum of three bf16 terms (8 bits each), to the last bit or the one before. A
// product of an f32 and a bf16 matrix is then three products of bf16 matrices, exact in f32 but for
// the sums: as accurate as f32 multiply-adds, at a third of the rate of bf16.
#pragma once

#include <algorithm>

#include "device/device.h"
#include "ops/routing/cuda/routing.h"
#include "ops/routing/routing.h"

namespace moebius::cuda {

constexpr int64_t kNumTerms = 3;

// Returns whether the tensor cores compute the product.
inline bool gate_on_tensor_cores(const Tensor& x_TD) { return x_TD.dtype == DType::bf16; }

// Returns the alignment that the copy engine asks of an address.
inline bool is_aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }
// Returns whether the copy engine of Hopper GPUs takes the rows.
inline bool gate_rows_are_aligned(const Tensor& x_TD) { return x_TD.dim(1) % 8 == 0 && is_aligned(x_TD); }

// Returns the columns of a block's tile, which has 128 rows.
inline int64_t gate_columns(int64_t num_experts) { return num_experts <= 64 ? 64 : 128; }

// Returns the number of parts of the tokens over which dw is summed: enough for a GPU of 132 multiprocessors, and none
// shorter than 512 tokens.
inline int64_t gate_partials(int64_t num_tokens, int64_t num_experts, int64_t width) {
  const int64_t tiles = div_ceil(width, 128) * div_ceil(num_experts, gate_columns(num_experts));
  return std::clamp<int64_t>(132 / tiles, 1, std::max<int64_t>(1, div_ceil(num_tokens, 512)));
}

struct GateScratch {
  bf16* w_3ED;        // terms of w, when it is f32; rows padded with zeros to d columns
  bf16* dlogits_3TE;  // terms of dlogits; rows padded with zeros to e columns
  int64_t d, e;       // multiples of 8
  int64_t num_bytes;

  GateScratch(void* base, const Tensor& x_TD, const Tensor& w_ED, bool backward)
      : d(div_ceil(w_ED.dim(1), 8) * 8), e(div_ceil(w_ED.dim(0), 8) * 8) {
    const int64_t used = gate_on_tensor_cores(x_TD) ? kNumTerms : 0;
    ScratchParts parts(base);
    parts.place(w_3ED, w_ED.dtype == DType::f32 ? used * w_ED.dim(0) * d : 0);
    parts.place(dlogits_3TE, backward ? used * x_TD.dim(0) * e : 0);
    num_bytes = parts.num_bytes();
  }
};

// Returns the bias of the logits; null if there is none.
inline const float* bias_of(const RouterLogitsFwd& a) { return a.bias_E.empty() ? nullptr : a.bias_E.ptr<float>(); }

// A bf16 matrix, or the terms of an f32 one, one after the other.
struct GateOperand {
  const bf16* data;
  int64_t rows, width;  // shape of a term
};

// terms[i, row, :] = term i of x[row, :], with zeros from `columns` to `width`, a multiple of 8
void split_terms(Stream& s, bf16* terms, const float* x, int64_t rows, int64_t columns, int64_t width, int num_terms);

// sm90/router_logits.cu. REQUIRES: gate_on_tensor_cores, gate_rows_are_aligned, and w is f32 or is_aligned.
void router_logits_on_tensor_cores(Stream& s, const RouterLogitsFwd& a);
// Computes dx, and the partials of dw.
void router_grads_on_tensor_cores(Stream& s, const RouterLogitsBwd& a);

// The same for any GPU of compute capability 8.0 and later, and rows of any width: sm80/router_logits.cu.
namespace sm80 {
void router_logits_on_tensor_cores(Stream& s, const RouterLogitsFwd& a);
void router_grads_on_tensor_cores(Stream& s, const RouterLogitsBwd& a);
}  // namespace sm80

}  // namespace moebius::cuda

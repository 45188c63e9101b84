// Quantisation of matrices to operands of products (core/quantized.h), and dequantisation.
//
// The scale of a block whose largest magnitude is m:
//   powers of two  the smallest 2^n with m <= max * 2^n, n >= -127, and 1 for m = 0; max is the largest element,
//                  448 or 57344. It is DeepGEMM's ceil_to_ue8m0(m / 448), the power-of-two scale of
//                  TransformerEngine, and the RCEIL mode of torchao. For m = 0 torchao has 2^-127, and DeepGEMM
//                  takes m for at least 1e-4.
//   nv_blocks      e4m3(m / 6 * g) with g = 448 * 6 / (largest magnitude of the tensor), and the
//                  tensor scale 1 / g, in f32 (NVIDIA, arXiv 2509.25149, appendix C)
//
// An element is x / scale, rounded to nearest even and saturated. Division by a power of two is
// exact, so that an element is rounded once. With nv_blocks it is x * (1 / (scale * tensor scale)),
// each operation in f32. The bits depend on the block alone, and for nv_blocks and per_tensor on the
// tensor. They do not depend on threads, tiles or the device.
#pragma once

#include "core/quantized.h"
#include "core/rng.h"
#include "device/device.h"

namespace moebius {

// Stochastic rounding to f4_e2m1: to one of the two neighbours, with the probabilities that make the expected value
// exact. The draw of an element is keyed by (seed, step, key) and indexed by
//   ((first row + r) * num_groups + first_group + g) * C + c
// for row r of group g of x (a group is an expert; without groups g = 0), so that no layout changes it.
struct StochasticRounding {
  Tensor draw_2;  // i64 [step, first row]; empty: to nearest even
  uint64_t seed = 0;
  uint32_t key = 0;
  int64_t first_group = 0, num_groups = 1;
};

// q = a quantised copy of x, or with q.transposed of its transpose
//
// x is f32 or bf16: [R, C], or [e, n, m], one matrix per expert. q.data has the shape of x or of its transpose; layout,
// dtype and scales are as in core/quantized.h.
//
// offsets: rows are sorted by expert. Rows at and past the last offset are not read; if q is not transposed, their
// elements and scales are not written. A transposed q has the shape [C, padded_rows(R, e)], and without experts may
// have [C, padded_rows(R)]; columns without a row are zeros. token: row r is x[token[r]].
struct Quantize {
  Operand q;            // out
  Tensor x_RC;          // in
  Tensor offsets_e1;    // in i32, may be empty
  Tensor token_R;       // in i32, may be empty; only with q.transposed and offsets
  bool square = false;  // nv_blocks: 16 rows of q.data share the scales of a block, as for weights
  // nv_blocks: each 16 elements along a row of q.data are first multiplied by diag(s) H / 4, with the Hadamard matrix H
  // of size 16 and the signs s of TransformerEngine. It cancels in a product of two such operands.
  bool hadamard = false;
  StochasticRounding stochastic = {};
  // Statistics of the non-zero elements of x, after the Hadamard transform, accumulated over calls: [0] their number;
  // [1] how many saturate; [2] how many become zero; [3] the smallest and [4] the largest scale of their blocks, times
  // the tensor scale.
  Tensor stats_5 = {};  // inout f64; may be empty
  // per_tensor and nv_blocks: the largest magnitudes of the matrices, as largest_magnitudes() has them, in columns
  // [first_matrix, first_matrix + e) of a row for each of W ranks that share these. Empty: x is all of them.
  Tensor magnitude_WB = {};  // in i32
  int64_t first_matrix = 0;
};
void quantize(Stream& s, const Quantize& a);
Cost cost(const Quantize& a);

// bits[e] = the bits of the largest magnitude in x of each matrix of q
//
// It is what quantize() makes the scale of a whole tensor from: of the rows that it reads, with nv_blocks after the
// Hadamard transform; 0 for a matrix without rows. The bits of magnitudes are ordered as integers, with infinity and
// then NaN above all numbers. So the largest of several ranks is that of their tensors together.
struct LargestMagnitudes {
  Tensor bits_e;  // out i32, the number of matrices
  Quantize of;    // in; its q has no memory. REQUIRES: per_tensor or nv_blocks
};
void largest_magnitudes(Stream& s, const LargestMagnitudes& a);
Cost cost(const LargestMagnitudes& a);

// out = the transpose of in, both with square_blocks or per_tensor scales
//
// Elements and scales are only moved, so it is exact. in is [R, C] and out [C, R], or both have rank 3.
// REQUIRES: out.transposed is not in.transposed.
struct TransposeQuantized {
  Operand out;  // out
  Operand in;   // in
};
void transpose_quantized(Stream& s, const TransposeQuantized& a);
Cost cost(const TransposeQuantized& a);

// x = the values of q.data
//
// x is f32 or bf16, with the shape of q.data. Values are computed in f32, and rounded once.
struct Dequantize {
  Tensor x;   // out
  Operand q;  // in
};
void dequantize(Stream& s, const Dequantize& a);
Cost cost(const Dequantize& a);

// x = the matrix of which q is a transposed copy
//
// x is f32 or bf16: [R, C], or [e, n, m]. q is as Quantize makes it from such an x, or from the rows that it gathers:
// with offsets q.data has padded_rows(R, e) columns, without them R or padded_rows(R). Rows at and past the last offset
// are not written. Values are computed in f32, and rounded once.
// With hadamard the transform of Quantize is undone, which needs whole blocks of 16 columns of q.
// Error{usage} unless q is transposed and has the shape of x^T, padded or not.
struct DequantizeTransposed {
  Tensor x_RC;            // out
  Operand q;              // in
  Tensor offsets_e1;      // in i32, may be empty
  bool hadamard = false;  // q was made with the Hadamard transform
};
void dequantize_transposed(Stream& s, const DequantizeTransposed& a);
Cost cost(const DequantizeTransposed& a);

}  // namespace moebius

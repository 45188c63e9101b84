// Newton-Schulz iterations towards a semi-orthogonal matrix, for Muon (K. Jordan et al., "Muon: an optimizer for
// hidden layers in neural networks", 2024; J. Liu et al., arXiv 2502.16982, section 2.1).
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// z = a x + b y,  or z[i] = x[i] a / (sqrt(sum_squares[i]) + 1e-7) + b y[i]  for each of B rows i of dim 0
//
// Each of z and x is f32 or bf16, and y is of the dtype of z. The maths is in f32, and the norm in double. z may be
// the memory of x or of y.
struct AddScaled {
  Tensor z;                   // out
  Tensor x;                   // in
  Tensor y = {};              // in, may be empty: no second term
  Tensor sum_squares_B = {};  // in f64, may be empty
  float a = 1, b = 1;
};
void add_scaled(Stream& s, const AddScaled& a);
Cost cost(const AddScaled& a);

// For each of B matrices:
// o = factor X_5,  X_0 = u / (|u| + 1e-7) with the Frobenius norm |u|, and with r = min(M, N)
//   S = X X^T [r, r] where M <= N, else X^T X
//   B = b S + c S^2,  (a, b, c) = (3.4445, -4.7750, 2.0315)
//   X_i+1 = a X + B X where M <= N, else a X + X B
//
// The singular values of X_5 are near 1, between 0.7 and 1.2, where those of X_0 are not tiny. X, S and B are in
// `compute`, and the products' sums in f32. u = 0 gives 0. o may be the memory of u. The bits of a matrix do not depend
// on the others, nor on their number.
struct NewtonSchulz {
  static constexpr int kSteps = 5;
  Tensor o_BMN;                // out f32
  Tensor u_BMN;                // in f32
  Tensor scratch;              // bytes of any dtype
  float factor = 1;            // multiplies X_5
  DType compute = DType::f32;  // or bf16
  static int64_t scratch_bytes(const Shape& BMN, DType compute);
};
void newton_schulz(Stream& s, const NewtonSchulz& a);

}  // namespace moebius

// d_expert_down() of operands of fp8_block, with results that are quantised for the products that read them: dh for
// d_expert_up, and the transposes of dh and sa for weight gradients. On a GPU the product stores g, and one pass over g
// and h computes all results. So dh and sa are not written and read again in bf16 by passes that quantise them.
#pragma once

#include "ops/experts/experts.h"

namespace moebius {

// g, dweight, dh and sa are as in DExpertDown (experts.h), without biases and terms of adapters. dh and sa are rounded
// to the dtype of h, and then quantised as quantize() does:
//   dh_rows                  dh, row_blocks
//   dh_columns, sa_columns   their transposes by expert, row_blocks and square_blocks: both or neither
//   dh, sa                   both or neither
// On a GPU dweight is the sum of sums over 128 columns of F. All else has the bits of d_expert_down() and quantize().
//
// h may be packed in 8 bits (ops/quantize/quantized_rows.h). The op then has the bits of one with the values of h,
// rounded to the dtype of g.
struct DExpertDownQuantised {
  Operand dh_rows;                  // out f8_e4m3 [R, 2F]
  Operand dh_columns, sa_columns;   // out f8_e4m3, transposed [padded_rows(R, e), 2F] and [padded_rows(R, e), F]
  Tensor dh_R2F, sa_RF, dweight_R;  // out; dweight f32
  Operand dout_TD, w2_eDF;          // in, row_blocks and transposed square_blocks
  Tensor h_R2F, weight_R;           // in; weight f32, of each row
  Tensor h_rows_RB = {};            // in u8, in place of h, which is then empty; or empty
  Rows rows;
  Tensor g_RF;     // scratch of the dtype of h, and of all results that are not quantised
  Tensor scratch;  // scratch_bytes(a, s) bytes of any dtype
  static int64_t scratch_bytes(const DExpertDownQuantised& a, const Stream& s);
  bool has_columns() const { return !dh_columns.is_plain(); }
  bool has_plain() const { return dh_R2F.shape.rank() == 2; }
  bool is_packed() const { return h_R2F.shape.rank() != 2; }
  int64_t num_rows() const { return g_RF.dim(0); }
  int64_t num_columns() const { return g_RF.dim(1); }  // F
};
void d_expert_down_quantised(Stream& s, const DExpertDownQuantised& a);

}  // namespace moebius

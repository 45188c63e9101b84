// The product of at most kFewRows rows, as when text is generated:
//   c = a W^T   (or c += a W^T)
// W is read once and in place, since packing it would cost more than the product.
//
// A row of c does not depend on the other rows, nor on how many there are (ops/cpu/few_rows.h).
#pragma once

#include "ops/gemm/gemm.h"

namespace moebius::cpu {

// Returns whether few_rows_gemm computes this: where the caller asks for it, and it can.
bool has_few_rows(const Gemm& a);
void few_rows_gemm(Stream& s, const Gemm& a);

}  // namespace moebius::cpu

// The interface between the CUDA files of experts. The generic kernels support every shape; for those of sm_80
// (mma.sync) and sm_90 (wgmma and TMA), takes() says which shapes they support. Host code only.
#pragma once

#include "core/error.h"
#include "device/device.h"
#include "ops/experts/experts.h"
#include "ops/experts/experts_scratch.h"

namespace moebius::cuda {

// Shared-memory tiles, f32 and bf16, any shape.
namespace generic {
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);
}  // namespace generic

// The runs of rows that an op computes: those of its part, or one of each expert with all of its rows.
struct RowRuns {
  RowRuns(const Rows& rows, const RowPart& part)
      : begins(rows.offsets_e1.ptr<int32_t>()), ends(begins + 1), num(static_cast<int>(rows.offsets_e1.numel() - 1)) {
    if (part.runs_2G.empty()) return;
    of_expert = static_cast<int>(part.runs_2G.dim(1)) / num;
    num = static_cast<int>(part.runs_2G.dim(1));
    begins = part.runs_2G.ptr<int32_t>();
    ends = begins + num;
  }

  const int32_t *begins, *ends;
  int num, of_expert = 1;
};

// For any GPU of compute capability 8.0 and later: bf16, columns of any width, at most kMaxPortableExperts;
// biases and every activation. takes() and the additions to the contract are as in sm90.
namespace sm80 {
bool takes(const ExpertUp& a);
bool takes(const ExpertDown& a);
bool takes(const DExpertDown& a);
bool takes(const DExpertUp& a);
bool takes(const ExpertWgrad& a);
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);

// For calls that declare few rows. y of expert_down may be f32, too.
bool takes_few_rows(const ExpertUp& a);
bool takes_few_rows(const ExpertDown& a);
void expert_up_few_rows(Stream& s, const ExpertUp& a);
void expert_down_few_rows(Stream& s, const ExpertDown& a);
}  // namespace sm80

// takes() looks at shapes, dtypes and addresses only, so its answer is the same in every step.
// Beyond the contract of experts.h: without offsets there is one expert, and all rows are its own; expert_wgrad alone
// needs offsets. Without weights of rows d_expert_down uses weights of 1, computes no dweight, and needs no scratch.
namespace sm90 {
bool takes(const ExpertUp& a);
bool takes(const ExpertDown& a);
bool takes(const DExpertDown& a);
bool takes(const DExpertUp& a);
bool takes(const ExpertWgrad& a);
void expert_up(Stream& s, const ExpertUp& a);
void expert_down(Stream& s, const ExpertDown& a);
void d_expert_down(Stream& s, const DExpertDown& a);
void d_expert_up(Stream& s, const DExpertUp& a);
void expert_wgrad(Stream& s, const ExpertWgrad& a);

// The kernels for FP8 operands with scales of blocks of 128, or of whole tensors. The arguments have passed
// check_block_scaled (ops/grouped_gemm/block_scaled.h).
void expert_up_f8(Stream& s, const ExpertUp& a);
void d_expert_down_f8(Stream& s, const DExpertDown& a);

//   y[r,:] = b[e] a[r,:]     with accumulate: +=, in f32 and rounded once
//
// b is [e, N, K] in memory, whichever side of a layer's product it names. Rows of no expert are not written.
struct RowsProductF8 {
  Tensor y_RN;          // out bf16
  Operand a_RK, b_eNK;  // in: row_blocks, square_blocks; or per_tensor
  Tensor offsets_e1;    // in, empty: one expert has all rows
  bool accumulate = false;
};
void rows_product_f8(Stream& s, const RowsProductF8& a, const char* who);

//   dw[e] = left right^T     over the columns of e; with accumulate: +=
//
// The left side has row_blocks, the right one square_blocks; or both have per_tensor scales, and the left side is
// f8_e5m2. Columns are as core/quantized.h places the rows of experts; those without a row are zeros.
struct WgradProductF8 {
  Tensor dw_eMN;              // out f32; inout with accumulate
  Operand left_MR, right_NR;  // in
  Tensor offsets_e1;          // in, empty: one expert has all columns
  bool accumulate = false;
  Tensor scratch = {};  // without offsets: WgradParts::scratch_bytes() (ops/experts/wgrad_parts.h) at 16 bytes
};
void wgrad_product_f8(Stream& s, const WgradProductF8& a, const char* who);
}  // namespace sm90

// dweight[r] = sum over p < num_partials of partial[p, r], for the rows that the experts have.
void add_dweight_partials(Stream& s, const DExpertDown& a, int64_t num_partials);

// dweight[r] += <dout[token[r],:], b2[e]> over the columns that b2 has; nothing where it is empty.
void add_bias_products(Stream& s, const DExpertDown& a);

inline const int32_t* index_of(const Rows& rows) {
  return rows.token_R.empty() ? nullptr : rows.token_R.ptr<int32_t>();
}

}  // namespace moebius::cuda

// The private list of what each device implements. Arguments are checked before
// these are called, and there is work to do.
#pragma once

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

struct Gemm;
struct RmsNormFwd;
struct RmsNormBwd;
struct QkNormFwd;
struct QkNormBwd;
struct SwigluFwd;
struct SwigluBwd;
struct GatedUp;
struct DGatedDown;
struct SumInto;
struct GatedAddFwd;
struct GatedAddBwd;
struct Jitter;
struct FillNormal;
struct EmbeddingFwd;
struct EmbeddingBwd;
struct LmLoss;
struct SumSquares;
struct ClipScale;
struct AdamW;
struct RopeTable;
struct RopeFwd;
struct RopeBwd;
struct AttentionFwd;
struct AttentionBwd;

namespace cpu {
void gemm(Stream& s, const Gemm& a);
void rms_norm_fwd(Stream& s, const RmsNormFwd& a);
void rms_norm_bwd(Stream& s, const RmsNormBwd& a);
void qk_norm_fwd(Stream& s, const QkNormFwd& a);
void qk_norm_bwd(Stream& s, const QkNormBwd& a);
void swiglu_fwd(Stream& s, const SwigluFwd& a);
void swiglu_bwd(Stream& s, const SwigluBwd& a);
void gated_up(Stream& s, const GatedUp& a);
void d_gated_down(Stream& s, const DGatedDown& a);
void fill_zero(Stream& s, Tensor x);
void copy(Stream& s, Tensor to, Tensor from);
void add(Stream& s, Tensor y, Tensor x);
void add_row(Stream& s, Tensor y_SD, Tensor row_1D);
void sum_into(Stream& s, const SumInto& a);
void gated_add_fwd(Stream& s, const GatedAddFwd& a);
void gated_add_bwd(Stream& s, const GatedAddBwd& a);
void jitter(Stream& s, const Jitter& a);
void fill_normal(Stream& s, const FillNormal& a);
int64_t find_nonfinite(Stream& s, Tensor x);
void embedding_fwd(Stream& s, const EmbeddingFwd& a);
void embedding_bwd(Stream& s, const EmbeddingBwd& a);
void lm_loss(Stream& s, const LmLoss& a);
void sum_squares(Stream& s, const SumSquares& a);
void clip_scale(Stream& s, const ClipScale& a);
void adamw(Stream& s, const AdamW& a);
void rope_table(Stream& s, const RopeTable& a);
void rope_fwd(Stream& s, const RopeFwd& a);
void rope_bwd(Stream& s, const RopeBwd& a);
void attention_fwd(Stream& s, const AttentionFwd& a);
void attention_bwd(Stream& s, const AttentionBwd& a);
int64_t scratch_bytes(const AttentionFwd& a, int num_threads);
int64_t scratch_bytes(const AttentionBwd& a, int num_threads);
}  // namespace cpu

// What stands in for a CUDA backend that was not built: Error{usage}, naming the op.
[[noreturn]] void missing_cuda(const char* op);

namespace cuda {
void gemm(Stream& s, const Gemm& a);
void rms_norm_fwd(Stream& s, const RmsNormFwd& a);
void rms_norm_bwd(Stream& s, const RmsNormBwd& a);
void qk_norm_fwd(Stream& s, const QkNormFwd& a);
void qk_norm_bwd(Stream& s, const QkNormBwd& a);
void swiglu_fwd(Stream& s, const SwigluFwd& a);
void swiglu_bwd(Stream& s, const SwigluBwd& a);
void gated_up(Stream& s, const GatedUp& a);
void d_gated_down(Stream& s, const DGatedDown& a);
void fill_zero(Stream& s, Tensor x);
void copy(Stream& s, Tensor to, Tensor from);
void add(Stream& s, Tensor y, Tensor x);
void add_row(Stream& s, Tensor y_SD, Tensor row_1D);
void sum_into(Stream& s, const SumInto& a);
void gated_add_fwd(Stream& s, const GatedAddFwd& a);
void gated_add_bwd(Stream& s, const GatedAddBwd& a);
void jitter(Stream& s, const Jitter& a);
void fill_normal(Stream& s, const FillNormal& a);
int64_t find_nonfinite(Stream& s, Tensor x);
void embedding_fwd(Stream& s, const EmbeddingFwd& a);
void embedding_bwd(Stream& s, const EmbeddingBwd& a);
void lm_loss(Stream& s, const LmLoss& a);
void sum_squares(Stream& s, const SumSquares& a);
void clip_scale(Stream& s, const ClipScale& a);
void adamw(Stream& s, const AdamW& a);
void rope_table(Stream& s, const RopeTable& a);
void rope_fwd(Stream& s, const RopeFwd& a);
void rope_bwd(Stream& s, const RopeBwd& a);
void attention_fwd(Stream& s, const AttentionFwd& a);
void attention_bwd(Stream& s, const AttentionBwd& a);
int64_t scratch_bytes(const AttentionFwd& a);
int64_t scratch_bytes(const AttentionBwd& a);
}  // namespace cuda

}  // namespace moebius

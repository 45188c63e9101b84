// The CUDA backend of a build without CUDA: every op says so.
#include "core/error.h"
#include "ops/backends.h"

namespace moebius::cuda {
namespace {

[[noreturn]] void missing(const char* op) {
  MOEBIUS_FAIL(usage, "{}: this build has no CUDA backend; set run.device = \"cpu\"", op);
}

}  // namespace

void gemm(Stream&, const Gemm&) { missing("gemm"); }
void rms_norm_fwd(Stream&, const RmsNormFwd&) { missing("rms_norm_fwd"); }
void rms_norm_bwd(Stream&, const RmsNormBwd&) { missing("rms_norm_bwd"); }
void swiglu_fwd(Stream&, const SwigluFwd&) { missing("swiglu_fwd"); }
void swiglu_bwd(Stream&, const SwigluBwd&) { missing("swiglu_bwd"); }
void fill_zero(Stream&, Tensor) { missing("fill_zero"); }
void copy(Stream&, Tensor, Tensor) { missing("copy"); }
void add(Stream&, Tensor, Tensor) { missing("add"); }
void sum_into(Stream&, const SumInto&) { missing("sum_into"); }
void gated_add_fwd(Stream&, const GatedAddFwd&) { missing("gated_add_fwd"); }
void gated_add_bwd(Stream&, const GatedAddBwd&) { missing("gated_add_bwd"); }
void jitter(Stream&, const Jitter&) { missing("jitter"); }
void fill_normal(Stream&, const FillNormal&) { missing("fill_normal"); }
int64_t find_nonfinite(Stream&, Tensor) { missing("find_nonfinite"); }
void embedding_fwd(Stream&, const EmbeddingFwd&) { missing("embedding_fwd"); }
void embedding_bwd(Stream&, const EmbeddingBwd&) { missing("embedding_bwd"); }
void lm_loss(Stream&, const LmLoss&) { missing("lm_loss"); }
void sum_squares(Stream&, const SumSquares&) { missing("sum_squares"); }
void clip_scale(Stream&, const ClipScale&) { missing("clip_scale"); }
void adamw(Stream&, const AdamW&) { missing("adamw"); }
void rope_table(Stream&, const RopeTable&) { missing("rope_table"); }
void rope_fwd(Stream&, const RopeFwd&) { missing("rope_fwd"); }
void rope_bwd(Stream&, const RopeBwd&) { missing("rope_bwd"); }
void attention_fwd(Stream&, const AttentionFwd&) { missing("attention_fwd"); }
void attention_bwd(Stream&, const AttentionBwd&) { missing("attention_bwd"); }

}  // namespace moebius::cuda

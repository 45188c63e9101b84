#include "ops/attention/cuda/attention.h"

#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_limits.h"
#include "ops/attention/attention_scratch.h"

namespace moebius::cuda {
namespace {

void note_portable(const Stream& s, const char* op, const Tensor& q, const Tensor& v) {
  if (q.dim(2) % 8 != 0 || v.dim(2) % 8 != 0)
    return note_odd_rows(s, op, q.dtype, q.dim(2) % 8 != 0 ? q.dim(2) : v.dim(2));
  if (!uses_hopper_kernels(s) || v.empty()) return;
  note_fallback_kernel(
      s, op,
      fmt::format("portable kernels, since the Hopper kernels take heads of 64 and of 128, of 192 "
                  "with values of 128, and of 96 and of 256 in a backward pass whose scratch fits; got {} "
                  "with values of {}",
                  q.dim(2), v.dim(2)));
}

// Refuses sizes that our own kernels cannot index.
void check_sizes(const char* who, const Tensor& q, const Tensor& v, int64_t batch) {
  MOEBIUS_CHECK(usage, q.dim(2) <= kMaxHeadWidth && v.dim(2) <= kMaxHeadWidth,
                "{}: on CUDA the width of a head must be at most {}; got q {} and v {}", who, kMaxHeadWidth,
                to_string(q), to_string(v));
  MOEBIUS_CHECK(usage, q.dim(1) <= kMaxHeadsOrBatch && batch <= kMaxHeadsOrBatch,
                "{}: on CUDA heads and batch must be at most {}; got {} and batch {}", who, kMaxHeadsOrBatch,
                to_string(q), batch);
}

// Notes that cuDNN needs more scratch than the call has.
template <class Op>
void check_may_be_own(const char* who, const Op& a) {
  MOEBIUS_CHECK(usage, a.kernels != AttentionKernels::cudnn,
                "{}: cuDNN asks for more than the {} bytes of scratch that its bound gives it for q {}; leave the "
                "choice of kernels out, or ask for own",
                who, a.scratch.num_bytes(), to_string(a.q_THd));
}

void run_attention_fwd(Stream& s, const AttentionFwd& a) {
  if (uses_cudnn(gpu_kernels(s), a)) {
    if (cudnn_attention_fwd(s, a)) return;
    check_may_be_own("attention_fwd", a);
  }
  check_sizes("attention_fwd", a.q_THd, a.v_UGd, a.batch);
  if (a.q_THd.dtype != DType::bf16) return generic_attention_fwd(s, a);
  if (uses_hopper_kernels(s) && sm90_takes(a)) return sm90_attention_fwd(s, a);
  note_portable(s, "attention_fwd", a.q_THd, a.v_UGd);
  sm80_attention_fwd(s, a);
}

}  // namespace

void attention_fwd(Stream& s, const AttentionFwd& a) {
  run_attention_fwd(s, a);
  if (a.max_logit_H.empty()) return;
  check_sizes("attention_fwd", a.q_THd, a.v_UGd, a.batch);
  raise_max_logit(s, a);
}

void attention_bwd(Stream& s, const AttentionBwd& a) {
  if (uses_cudnn(gpu_kernels(s), a)) {
    if (cudnn_attention_bwd(s, a)) return;
    check_may_be_own("attention_bwd", a);
  }
  check_sizes("attention_bwd", a.q_THd, a.v_TGd, a.batch);
  const bool is_sm90 = uses_hopper_kernels(s) && sm90_takes(a);
  MOEBIUS_CHECK(usage, is_sm90 || a.path == AttentionBwdPath::chosen,
                "attention_bwd: a path was asked for, and the Hopper kernels do not take q {} here; leave the path out",
                to_string(a.q_THd));
  if (a.q_THd.dtype != DType::bf16) return generic_attention_bwd(s, a);
  if (is_sm90) return sm90_attention_bwd(s, a);
  note_portable(s, "attention_bwd", a.q_THd, a.v_TGd);
  sm80_attention_bwd(s, a);
}

}  // namespace moebius::cuda

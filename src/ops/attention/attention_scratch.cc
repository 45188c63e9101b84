#include "ops/attention/attention_scratch.h"

#include <algorithm>

#include "ops/attention/attention_backends.h"
#include "ops/attention/cudnn_shapes.h"

namespace moebius {
namespace {

template <class Op>
int64_t planned_bytes(const Op& a, const Stream& s, const GpuKernels& on) {
  const bool counts_for_gpu = s.device() == DeviceKind::null && s.target() == DeviceKind::cuda;
  return counts_for_gpu ? cuda::scratch_bytes(a, on) : Op::scratch_bytes(a, s);
}

template <class Op>
bool chooses_cudnn(const GpuKernels& on, const Op& a) {
  if (on.are_portable()) return false;
  return on.is_hopper ? cudnn_is_chosen(a) : cudnn_is_chosen_elsewhere(a);
}

}  // namespace

bool uses_cudnn(const GpuKernels& on, const AttentionFwd& a) { return chooses_cudnn(on, a); }
bool uses_cudnn(const GpuKernels& on, const AttentionBwd& a) { return chooses_cudnn(on, a); }
bool may_use_cudnn(const GpuKernels& on, const AttentionFwd& a) { return !on.are_portable() && cudnn_can(a); }
bool may_use_cudnn(const GpuKernels& on, const AttentionBwd& a) {
  return !on.are_portable() && (on.is_hopper ? cudnn_can(a) : cudnn_can_elsewhere(a));
}

int64_t planned_scratch_bytes(const AttentionFwd& a, const Stream& s, const GpuKernels& on) {
  return planned_bytes(a, s, on);
}
int64_t planned_scratch_bytes(const AttentionBwd& a, const Stream& s, const GpuKernels& on) {
  return planned_bytes(a, s, on);
}

namespace cuda {

int64_t generic_scratch_bytes(const AttentionBwd& a) { return a.lse_TH.num_bytes(); }
int64_t sm80_scratch_bytes(const AttentionBwd& a) { return 2 * a.lse_TH.num_bytes(); }

// Without keys there is no memory to describe for the copy engine.
bool sm90_takes(const AttentionFwd& a) { return has_hopper_kernel(a.q_THd, a.v_UGd) && !a.v_UGd.empty(); }
bool sm90_takes(const AttentionBwd& a) {
  if (a.v_TGd.empty()) return false;
  if (has_hopper_kernel(a.q_THd, a.v_TGd)) return true;
  const int64_t width = a.q_THd.dim(2);
  const AttentionBwdPath only = only_path(width);
  return a.q_THd.dtype == DType::bf16 && width == a.v_TGd.dim(2) && only != AttentionBwdPath::chosen &&
         can_take(ds_sizes(a), only);
}

DsSizes ds_sizes(const AttentionBwd& a) {
  const AttentionSizes z = attention_sizes(a);
  return {.batch = a.batch,
          .rows = z.rows,
          .heads = z.heads,
          .kv_heads = z.kv_heads,
          .width = z.width,
          .v_width = z.v_width,
          .window = z.window,
          .has_documents = !a.doc_start_T.empty(),
          .is_part = a.is_part,
          .owns_gpu = a.owns_gpu};
}

AttentionBwdPath sm90_path(const AttentionBwd& a) {
  const DsSizes z = ds_sizes(a);
  if (a.path == AttentionBwdPath::chosen) return bwd_path(z);
  MOEBIUS_CHECK(usage, can_take(z, a.path),
                "attention_bwd: the path that was asked for has no bounded scratch for q {} in {} sequences; leave "
                "the path out",
                to_string(a.q_THd), a.batch);
  return a.path;
}

int64_t sm90_sums_bytes(const AttentionBwd& a) { return div_ceil(2 * a.lse_TH.num_bytes(), 256) * 256; }

int64_t sm90_path_bytes(const DsSizes& z, AttentionBwdPath path) {
  if (path == AttentionBwdPath::one_kernel) return fused_plan(z, kMaxDqBytes, kMaxDsBytes).bytes();
  return path == AttentionBwdPath::kept_ds ? ds_plan(z, kMaxDsBytes).bytes() : 0;
}

int64_t sm90_scratch_bytes(const AttentionBwd& a) {
  return sm90_sums_bytes(a) + sm90_path_bytes(ds_sizes(a), sm90_path(a));
}

// Plans without a GPU count for Hopper. So Hopper has the small workspace that the forward pass has elsewhere.
int64_t scratch_bytes(const AttentionFwd& a, const GpuKernels& on) {
  return !on.are_portable() && cudnn_is_chosen_elsewhere(a) ? cudnn_scratch_bytes(a) : 0;
}

// cuDNN may refuse a call that it was chosen for, and then our own kernels run it.
int64_t scratch_bytes(const AttentionBwd& a, const GpuKernels& on) {
  if (a.q_THd.dtype != DType::bf16) return generic_scratch_bytes(a);
  const int64_t own = on.has_hopper_kernels() && sm90_takes(a) ? sm90_scratch_bytes(a) : sm80_scratch_bytes(a);
  return uses_cudnn(on, a) ? std::max(own, cudnn_scratch_bytes(a)) : own;
}

int64_t scratch_bytes(const CachedAttentionFwd& a) {
  return a.q_NHd.dim(0) * a.q_NHd.dim(1) * num_cached_pieces(a) * (a.q_NHd.dim(2) + 2) * int64_t{sizeof(float)};
}

}  // namespace cuda
}  // namespace moebius

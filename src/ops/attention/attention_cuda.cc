#include "ops/attention/attention_cuda.h"

#include <algorithm>

#include "ops/backends.h"

namespace moebius::cuda {
namespace {

AttentionSizes sizes_of(const Tensor& q, const Tensor& k, const Tensor& doc_start, int64_t batch, int64_t window,
                        float scale) {
  return {.rows = q.dim(0) / batch,
          .kv_rows = k.dim(0) / batch,
          .heads = narrow<int>(q.dim(1)),
          .kv_heads = narrow<int>(k.dim(1)),
          .width = narrow<int>(q.dim(2)),
          .window = window,
          .scale = scale,
          .doc_start = doc_start.empty() ? nullptr : doc_start.ptr<int32_t>()};
}

bool is_bf16_of_64_or_128(const Tensor& q) { return q.dtype == DType::bf16 && (q.dim(2) == 64 || q.dim(2) == 128); }

// What own kernels cannot index.
void check_sizes(const char* who, const Tensor& q, int64_t batch) {
  MOEBIUS_CHECK(usage, q.dim(2) <= 256, "{}: on CUDA the width of a head must be at most 256; got {}", who,
                to_string(q));
  MOEBIUS_CHECK(usage, q.dim(1) <= 65535 && batch <= 65535,
                "{}: on CUDA heads and batch must be at most 65535; got {} and batch {}", who, to_string(q), batch);
}

}  // namespace

AttentionSizes attention_sizes(const AttentionFwd& a) {
  return sizes_of(a.q_THd, a.k_UGd, a.doc_start_T, a.batch, a.window, a.scale);
}

AttentionSizes attention_sizes(const AttentionBwd& a) {
  return sizes_of(a.q_THd, a.k_TGd, a.doc_start_T, a.batch, a.window, a.scale);
}

bool sm90_takes(const AttentionFwd& a) { return is_bf16_of_64_or_128(a.q_THd); }
bool sm90_takes(const AttentionBwd& a) { return is_bf16_of_64_or_128(a.q_THd); }

int64_t scratch_bytes(const AttentionFwd& a) { return cudnn_takes(a) ? cudnn_scratch_bytes(a) : 0; }

int64_t scratch_bytes(const AttentionBwd& a) {
  const int64_t own = sm90_takes(a) ? sm90_scratch_bytes(a) : generic_scratch_bytes(a);
  return cudnn_takes(a) ? std::max(own, cudnn_scratch_bytes(a)) : own;
}

void attention_fwd(Stream& s, const AttentionFwd& a) {
  if (cudnn_takes(a) && cudnn_attention_fwd(s, a)) return;
  check_sizes("attention_fwd", a.q_THd, a.batch);
  if (sm90_takes(a)) return sm90_attention_fwd(s, a);
  generic_attention_fwd(s, a);
}

void attention_bwd(Stream& s, const AttentionBwd& a) {
  if (cudnn_takes(a) && cudnn_attention_bwd(s, a)) return;
  check_sizes("attention_bwd", a.q_THd, a.batch);
  if (sm90_takes(a)) return sm90_attention_bwd(s, a);
  generic_attention_bwd(s, a);
}

}  // namespace moebius::cuda

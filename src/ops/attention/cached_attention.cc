#include "ops/attention/cached_attention.h"

#include <algorithm>

#include "ops/attention/attention_backends.h"
#include "ops/op_checks.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const char* who, const CachedAttentionFwd& a) {
  const Tensor &q = a.q_NHd, &k = a.k_UGd;
  MOEBIUS_CHECK(usage, q.dtype == DType::f32 || q.dtype == DType::bf16, "{}: q must be f32 or bf16; got {}", who,
                to_string(q));
  MOEBIUS_CHECK(usage, q.shape.rank() == 3 && k.shape.rank() == 3,
                "{}: q and k must be [rows, heads, d]; got {} and {}", who, to_string(q), to_string(k));
  const int64_t rows = q.dim(0), heads = q.dim(1), width = q.dim(2), kv_heads = k.dim(1);
  MOEBIUS_CHECK(usage, width > 0 && kv_heads > 0 && heads % kv_heads == 0,
                "{}: the heads of k must divide those of q; got q {} and k {}", who, to_string(q), to_string(k));
  MOEBIUS_CHECK(usage, a.max_tokens > 0 && k.dim(0) % a.max_tokens == 0,
                "{}: max_tokens {} must divide the rows of the cache {}", who, a.max_tokens, to_string(k));
  MOEBIUS_CHECK(usage, rows <= k.dim(0) / a.max_tokens,
                "{}: expected at most one row for each of the cache's {} sequences; got {}", who,
                k.dim(0) / a.max_tokens, rows);
  MOEBIUS_CHECK(usage, a.window >= 0, "{}: window must not be negative; got {}; 0 means no window", who, a.window);
  check_tensor(who, "o", a.o_NHd, q.dtype, q.shape);
  check_tensor(who, "lse", a.lse_NH, DType::f32, {rows, heads});
  check_tensor(who, "cached k", k, q.dtype, {k.dim(0), kv_heads, width});
  check_tensor(who, "cached v", a.v_UGd, q.dtype, k.shape);
  check_tensor(who, "k", a.k_NGd, q.dtype, {rows, kv_heads, width});
  check_tensor(who, "v", a.v_NGd, q.dtype, {rows, kv_heads, width});
  check_tensor(who, "pos", a.pos_N, DType::i32, {rows});
  check_tensor(who, "sequence", a.sequence_N, DType::i32, {rows});
}

}  // namespace

int64_t CachedAttentionFwd::scratch_bytes(const CachedAttentionFwd& a, const Stream& s) {
  return s.target() == DeviceKind::cuda ? cuda::scratch_bytes(a) : cpu::scratch_bytes(a, s.pool().size());
}

void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a) {
  const char* who = "cached_attention_fwd";
  check(who, a);
  check_scratch(who, a.scratch, CachedAttentionFwd::scratch_bytes(a, s));
  OpScope scope(s, who, cost(a));
  if (a.q_NHd.empty()) return;
  run_on_device(s, cpu::cached_attention_fwd, cuda::cached_attention_fwd, a);
}

Cost cost(const CachedAttentionFwd& a) {
  const int64_t seen = a.window > 0 ? std::min(a.window, a.max_tokens) : a.max_tokens;
  const double keys = static_cast<double>(a.q_NHd.dim(0) * seen);
  const int64_t row_bytes = a.k_UGd.dim(1) * a.k_UGd.dim(2) * size_of(a.k_UGd.dtype);
  return {4.0 * keys * static_cast<double>(a.q_NHd.dim(1) * a.q_NHd.dim(2)),
          2.0 * keys * static_cast<double>(row_bytes) + static_cast<double>(2 * a.q_NHd.num_bytes())};
}

}  // namespace moebius

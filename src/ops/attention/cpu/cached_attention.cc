#include "ops/attention/cached_attention.h"

#include <cstring>

#include "ops/attention/attention.h"
#include "ops/attention/attention_backends.h"

namespace moebius::cpu {
namespace {

// The attention of row n over a sequence of pos + 1 keys.
AttentionFwd attention_of(const CachedAttentionFwd& a, int64_t n, int64_t first, int64_t pos) {
  return {.o_THd = a.o_NHd.rows(n, n + 1),
          .lse_TH = a.lse_NH.rows(n, n + 1),
          .q_THd = a.q_NHd.rows(n, n + 1),
          .k_UGd = a.k_UGd.rows(first, first + pos + 1),
          .v_UGd = a.v_UGd.rows(first, first + pos + 1),
          .window = a.window,
          .scale = a.scale,
          .scratch = a.scratch};
}

void put_row(const Tensor& cache, int64_t at, const Tensor& rows, int64_t n) {
  const Tensor from = rows.rows(n, n + 1);
  std::memcpy(cache.rows(at, at + 1).data, from.data, static_cast<size_t>(from.num_bytes()));
}

}  // namespace

int64_t scratch_bytes(const CachedAttentionFwd& a, int num_threads) {
  if (a.q_NHd.empty()) return 0;
  return cpu::scratch_bytes(attention_of(a, 0, 0, a.max_tokens - 1), num_threads);
}

void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a) {
  for (int64_t n = 0; n < a.q_NHd.dim(0); ++n) {
    const int64_t first = a.sequence_N.ptr<int32_t>()[n] * a.max_tokens, pos = a.pos_N.ptr<int32_t>()[n];
    put_row(a.k_UGd, first + pos, a.k_NGd, n);
    put_row(a.v_UGd, first + pos, a.v_NGd, n);
    cpu::attention_fwd(s, attention_of(a, n, first, pos));
  }
}

}  // namespace moebius::cpu

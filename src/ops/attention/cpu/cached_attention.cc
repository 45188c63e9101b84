#include "ops/attention/cached_attention.h"

#include <algorithm>
#include <cstring>

#include "ops/attention/attention.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/cpu/attention_task.h"
#include "ops/attention/cpu/single_query.h"

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

// Copies head g of row n to a row of the cache.
void put_head(const Tensor& cache, int64_t at, const Tensor& rows, int64_t n, int64_t g) {
  const int64_t head_bytes = cache.dim(2) * size_of(cache.dtype), row_bytes = cache.dim(1) * head_bytes;
  std::memcpy(static_cast<char*>(cache.data) + at * row_bytes + g * head_bytes,
              static_cast<const char*>(rows.data) + n * row_bytes + g * head_bytes, static_cast<size_t>(head_bytes));
}

// Computes the query heads of kv head g of row n. `is_last`: the next head is not this task's.
void attend_single(const CachedAttentionFwd& a, int64_t n, int64_t g, int64_t first, int64_t pos, bool is_last,
                   const SingleQueryArrays& arrays) {
  const int64_t heads = a.q_NHd.dim(1), kv_heads = a.k_UGd.dim(1), width = a.q_NHd.dim(2);
  const int64_t group = heads / kv_heads, cached = (first * kv_heads + g) * width;
  for (int64_t h = g * group; h < (g + 1) * group; h += kHeadsTogether) {
    const int64_t at = n * heads + h;
    single_query_fwd({.q = a.q_NHd.ptr<bf16>() + at * width,
                      .k = a.k_UGd.ptr<bf16>() + cached,
                      .v = a.v_UGd.ptr<bf16>() + cached,
                      .o = a.o_NHd.ptr<bf16>() + at * width,
                      .lse = a.lse_NH.ptr<float>() + at,
                      .num_heads = std::min(kHeadsTogether, (g + 1) * group - h),
                      .width = width,
                      .row_stride = kv_heads * width,
                      .keys = {a.window > 0 ? std::max<int64_t>(0, pos + 1 - a.window) : 0, pos + 1},
                      .scale = a.scale,
                      .prefetches_next_head = !is_last},
                     arrays);
  }
}

}  // namespace

int64_t scratch_bytes(const CachedAttentionFwd& a, int num_threads) {
  if (a.q_NHd.empty()) return 0;
  return cpu::scratch_bytes(attention_of(a, 0, 0, a.max_tokens - 1), num_threads);
}

// A task is a kv head of a row, with all query heads that read it. If there are many rows, it is all kv heads of a row,
// since their keys are neighbours in memory.
void cached_attention_fwd(Stream& s, const CachedAttentionFwd& a) {
  const int64_t N = a.q_NHd.dim(0), kv_heads = a.k_UGd.dim(1), group = a.q_NHd.dim(1) / kv_heads,
                width = a.q_NHd.dim(2);
  const int64_t of_task = N >= 16 ? kv_heads : 1, tasks_of_row = kv_heads / of_task, slice = scratch_bytes(a, 1);
  const bool is_single = a.q_NHd.dtype == DType::bf16 && has_single_query(width);
  MOEBIUS_ASSERT(SingleQueryArrays(Slice(nullptr), width).num_bytes <= slice);
  s.pool().run(N * tasks_of_row, [&](int64_t task, int worker) {
    const int64_t n = task / tasks_of_row, begin = task % tasks_of_row * of_task, end = begin + of_task;
    const int64_t first = a.sequence_N.ptr<int32_t>()[n] * a.max_tokens, pos = a.pos_N.ptr<int32_t>()[n];
    const SingleQueryArrays arrays(Slice(static_cast<char*>(a.scratch.data) + worker * slice), width);
    for (int64_t g = begin; g < end; ++g) {
      put_head(a.k_UGd, first + pos, a.k_NGd, n, g);
      put_head(a.v_UGd, first + pos, a.v_NGd, n, g);
      if (is_single) {
        attend_single(a, n, g, first, pos, g + 1 == end, arrays);
        continue;
      }
      const AttentionFwd row = attention_of(a, n, first, pos);
      for (int64_t h = g * group; h < (g + 1) * group; ++h) run_attention_task(row, h, worker);
    }
  });
}

}  // namespace moebius::cpu

#include <atomic>
#include <cmath>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_tiles.h"
#include "ops/attention/cpu/attention_task.h"
#include "ops/attention/cpu/softmax_row.h"
#include "ops/cpu/vector.h"

namespace moebius {
namespace {

// The arrays of one tile of queries: scores and probabilities of a tile of keys,
// the unnormalised output, and the running softmax.
template <class T>
struct Tile {
  Tile(cpu::Slice slice, int64_t width)
      : scores(slice.take<float>(cpu::kQueryTile * cpu::kKeyTile)),
        probabilities(slice.take<T>(cpu::kQueryTile * cpu::kKeyTile)),
        out(slice.take<float>(cpu::kQueryTile * width)),
        max(slice.take<float>(cpu::kQueryTile)),
        sum(slice.take<float>(cpu::kQueryTile)),
        num_bytes(slice.used()) {}
  float* scores;
  T* probabilities;
  float *out, *max, *sum;
  int64_t num_bytes;
};

}  // namespace

int64_t cpu::scratch_bytes(const AttentionFwd& a, int num_threads) {
  return num_threads * Tile<float>(cpu::Slice(nullptr), a.v_UGd.dim(2)).num_bytes;
}

namespace cpu {
namespace {

// The maximum does not depend on the order in which tasks arrive.
void raise(float& max, float x) {
  std::atomic_ref<float> shared(max);
  float now = shared.load(std::memory_order_relaxed);
  while (x > now && !shared.compare_exchange_weak(now, x, std::memory_order_relaxed)) {
  }
}

template <class T>
void attend(const AttentionFwd& a, const Visibility& visible, int64_t b, int64_t h, Range queries, Tile<T> tile) {
  const int64_t width = a.v_UGd.dim(2), heads = a.q_THd.dim(1), kv_head = h / (heads / a.k_UGd.dim(1));
  const int64_t first_row = b * visible.rows + queries.begin, num_queries = queries.size();
  const DType dtype = a.q_THd.dtype;
  std::fill(tile.out, tile.out + num_queries * width, 0.0f);
  std::fill(tile.max, tile.max + num_queries, -std::numeric_limits<float>::infinity());
  std::fill(tile.sum, tile.sum + num_queries, 0.0f);
  for_key_tiles(visible.keys_of(b, queries), [&](Range keys) {
    const int64_t first_key = b * visible.kv_rows + keys.begin, num_keys = keys.size();
    tile_gemm({.c = {tile.scores, num_keys, DType::f32},
               .a = head_of(a.q_THd, first_row, h),
               .b = head_of(a.k_UGd, first_key, kv_head, true),
               .m = num_queries,
               .n = num_keys,
               .k = a.q_THd.dim(2)});
    for (int64_t i = 0; i < num_queries; ++i) {
      const Range seen = visible.keys_of(b, queries.begin + i).within(keys);
      softmax_row(tile.probabilities + i * num_keys, tile.scores + i * num_keys,
                  {seen.begin - keys.begin, seen.end - keys.begin}, num_keys, a.scale, tile.max[i], tile.sum[i],
                  tile.out + i * width, width);
    }
    tile_gemm({.c = {tile.out, width, DType::f32},
               .a = {tile.probabilities, num_keys, dtype},
               .b = head_of(a.v_UGd, first_key, kv_head),
               .m = num_queries,
               .n = width,
               .k = num_keys,
               .accumulate = true});
  });
  if (!a.max_logit_H.empty()) raise(a.max_logit_H.ptr<float>()[h], *std::max_element(tile.max, tile.max + num_queries));
  for (int64_t i = 0; i < num_queries; ++i) {
    const int64_t at = (first_row + i) * heads + h;
    T* o = a.o_THd.ptr<T>() + at * width;
    const float inverse = tile.sum[i] > 0 ? 1.0f / tile.sum[i] : 0.0f;  // a query of a part may attend to no key
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) o[c] = from_f32<T>(tile.out[i * width + c] * inverse);
    a.lse_TH.ptr<float>()[at] = tile.max[i] + std::log(tile.sum[i]);
  }
}

}  // namespace

int64_t num_attention_tasks(const AttentionFwd& a) {
  const Visibility visible = visibility_of(a, a.q_THd, a.k_UGd);
  return a.batch * a.q_THd.dim(1) * div_ceil(visible.rows, kQueryTile);
}

void run_attention_task(const AttentionFwd& a, int64_t task, int worker) {
  const Visibility visible = visibility_of(a, a.q_THd, a.k_UGd);
  const int64_t heads = a.q_THd.dim(1), width = a.v_UGd.dim(2), tiles = div_ceil(visible.rows, kQueryTile);
  with_float_type(a.q_THd.dtype, [&]<class T>(T) {
    const Tile<T> tile(Slice(static_cast<char*>(a.scratch.data) + worker * scratch_bytes(a, 1)), width);
    const int64_t begin = (tiles - 1 - task % tiles) * kQueryTile;  // the longest first
    attend(a, visible, task / tiles / heads, task / tiles % heads, {begin, std::min(begin + kQueryTile, visible.rows)},
           tile);
  });
}

void attention_fwd(Stream& s, const AttentionFwd& a) {
  s.pool().run(num_attention_tasks(a), [&](int64_t task, int worker) { run_attention_task(a, task, worker); });
}

}  // namespace cpu
}  // namespace moebius

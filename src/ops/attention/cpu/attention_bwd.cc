#include "ops/attention/attention.h"
#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_tiles.h"
#include "ops/cpu/vector.h"

namespace moebius {
namespace {

// The arrays of one kv head of one sequence: its gradients in f32, and a tile of scores
// with their gradients.
template <class T>
struct Tile {
  Tile(cpu::Slice slice, const AttentionBwd& a)
      : Tile(slice, a.q_THd.dim(2), a.v_TGd.dim(2), a.k_TGd.dim(0) / a.batch) {}
  Tile(cpu::Slice slice, int64_t width, int64_t v_width, int64_t kv_rows)
      : scores(slice.take<float>(cpu::kQueryTile * cpu::kKeyTile)),
        dprobabilities(slice.take<float>(cpu::kQueryTile * cpu::kKeyTile)),
        probabilities(slice.take<T>(cpu::kQueryTile * cpu::kKeyTile)),
        dscores(slice.take<T>(cpu::kQueryTile * cpu::kKeyTile)),
        dq(slice.take<float>(cpu::kQueryTile * width)),
        dk(slice.take<float>(kv_rows * width)),
        dv(slice.take<float>(kv_rows * v_width)),
        delta(slice.take<float>(cpu::kQueryTile)),
        num_bytes(slice.used()) {}
  float *scores, *dprobabilities;
  T *probabilities, *dscores;
  float *dq, *dk, *dv, *delta;
  int64_t num_bytes;
};

}  // namespace

int64_t cpu::scratch_bytes(const AttentionBwd& a, int num_threads) {
  return num_threads * Tile<float>(cpu::Slice(nullptr), a).num_bytes;
}

namespace cpu {
namespace {

template <class T>
float dot(const T* x, const T* y, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += to_f32(x[i]) * to_f32(y[i]);
  return sum;
}

template <class T>
void store_rows(const Matrix& to, const float* from, int64_t rows, int64_t width) {
  for (int64_t i = 0; i < rows; ++i) {
    T* row = static_cast<T*>(to.data) + i * to.ld;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) row[c] = from_f32<T>(from[i * width + c]);
  }
}

// p = e^(scale score - lse) and ds = scale p (dp - delta) for the keys seen, 0 for the others.
template <class T>
void dscores_row(T* probabilities, T* dscores, const float* scores, const float* dprobabilities, Range seen,
                 int64_t num_keys, float scale, float lse, float delta) {
  for (T* row : {probabilities, dscores}) {
    std::fill(row, row + seen.begin, T{});
    std::fill(row + seen.end, row + num_keys, T{});
  }
#pragma omp simd
  for (int64_t j = seen.begin; j < seen.end; ++j) {
    const float p = exp_f32(scale * scores[j] - lse);
    probabilities[j] = from_f32<T>(p);
    dscores[j] = from_f32<T>(scale * p * (dprobabilities[j] - delta));
  }
}

// The five products of a tile of queries and a tile of keys.
template <class T>
void bwd_tile(const AttentionBwd& a, const Visibility& visible, int64_t b, int64_t h, Range queries, Range keys,
              const Tile<T>& tile) {
  const int64_t width = a.q_THd.dim(2), v_width = a.v_TGd.dim(2), heads = a.q_THd.dim(1),
                kv_head = h / (heads / a.k_TGd.dim(1));
  const int64_t row = b * visible.rows + queries.begin, key_row = b * visible.kv_rows + keys.begin, m = queries.size(),
                n = keys.size();
  const Matrix k = head_of(a.k_TGd, key_row, kv_head), k_t = head_of(a.k_TGd, key_row, kv_head, true),
               v_t = head_of(a.v_TGd, key_row, kv_head, true);
  const Matrix q = head_of(a.q_THd, row, h), dout = head_of(a.do_THd, row, h);
  tile_gemm({.c = {tile.scores, n, DType::f32}, .a = q, .b = k_t, .m = m, .n = n, .k = width});
  tile_gemm({.c = {tile.dprobabilities, n, DType::f32}, .a = dout, .b = v_t, .m = m, .n = n, .k = v_width});
  for (int64_t i = 0; i < m; ++i) {
    const Range seen = visible.keys_of(b, queries.begin + i).within(keys);
    dscores_row(tile.probabilities + i * n, tile.dscores + i * n, tile.scores + i * n, tile.dprobabilities + i * n,
                {seen.begin - keys.begin, seen.end - keys.begin}, n, a.scale,
                a.lse_TH.ptr<float>()[(row + i) * heads + h], tile.delta[i]);
  }
  const Matrix p_t{tile.probabilities, n, dtype_of<T>, true}, ds{tile.dscores, n, dtype_of<T>},
      ds_t{tile.dscores, n, dtype_of<T>, true};
  tile_gemm({.c = {tile.dv + keys.begin * v_width, v_width, DType::f32},
             .a = p_t,
             .b = dout,
             .m = n,
             .n = v_width,
             .k = m,
             .accumulate = true});
  tile_gemm({.c = {tile.dk + keys.begin * width, width, DType::f32},
             .a = ds_t,
             .b = q,
             .m = n,
             .n = width,
             .k = m,
             .accumulate = true});
  tile_gemm({.c = {tile.dq, width, DType::f32}, .a = ds, .b = k, .m = m, .n = width, .k = n, .accumulate = true});
}

// Loops over query heads, then tiles of queries, then tiles of keys, each in order. So the order of every sum is fixed.
template <class T>
void bwd_kv_head(const AttentionBwd& a, const Visibility& visible, int64_t b, int64_t kv_head, const Tile<T>& tile) {
  const int64_t width = a.q_THd.dim(2), v_width = a.v_TGd.dim(2), heads = a.q_THd.dim(1),
                group = heads / a.k_TGd.dim(1), first_row = b * visible.rows, first_key = b * visible.kv_rows;
  std::fill(tile.dk, tile.dk + visible.kv_rows * width, 0.0f);
  std::fill(tile.dv, tile.dv + visible.kv_rows * v_width, 0.0f);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    for (int64_t begin = 0; begin < visible.rows; begin += kQueryTile) {
      const Range queries{begin, std::min(begin + kQueryTile, visible.rows)};
      std::fill(tile.dq, tile.dq + queries.size() * width, 0.0f);
      for (int64_t i = 0; i < queries.size(); ++i) {
        const int64_t at = ((first_row + begin + i) * heads + h) * v_width;
        tile.delta[i] = dot(a.do_THd.ptr<T>() + at, a.o_THd.ptr<T>() + at, v_width);
      }
      for_key_tiles(visible.keys_of(b, queries), [&](Range keys) { bwd_tile(a, visible, b, h, queries, keys, tile); });
      store_rows<T>(head_of(a.dq_THd, first_row + begin, h), tile.dq, queries.size(), width);
    }
  }
  store_rows<T>(head_of(a.dk_TGd, first_key, kv_head), tile.dk, visible.kv_rows, width);
  store_rows<T>(head_of(a.dv_TGd, first_key, kv_head), tile.dv, visible.kv_rows, v_width);
}

}  // namespace

// A task is one kv head of one sequence.
void attention_bwd(Stream& s, const AttentionBwd& a) {
  const int64_t kv_heads = a.k_TGd.dim(1), slice_bytes = scratch_bytes(a, 1);
  const Visibility visible = visibility_of(a, a.q_THd, a.k_TGd);
  with_float_type(a.q_THd.dtype, [&](auto zero) {
    s.pool().run(a.batch * kv_heads, [&](int64_t task, int worker) {
      const Tile<decltype(zero)> tile(Slice(static_cast<char*>(a.scratch.data) + worker * slice_bytes), a);
      bwd_kv_head(a, visible, task / kv_heads, task % kv_heads, tile);
    });
  });
}

}  // namespace cpu
}  // namespace moebius

#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/mla/mla.h"
#include "ops/mla/mla_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 16;  // of a task

// x points at the rotated columns. Pair i is (x[i step], x[i step + gap]).
template <class T>
void rotate(T* x, const float* cos_sin, int64_t half, bool interleaved, float sign) {
  const int64_t step = interleaved ? 2 : 1, gap = interleaved ? 1 : half;
  for (int64_t i = 0; i < half; ++i) {
    T &a = x[i * step], &b = x[i * step + gap];
    const float cos = cos_sin[i], sin = sign * cos_sin[half + i], u = to_f32(a), v = to_f32(b);
    a = from_f32<T>(u * cos - v * sin);
    b = from_f32<T>(v * cos + u * sin);
  }
}

template <class T>
void rotate_rows(const RotateHeads& a, int64_t begin, int64_t end) {
  const int64_t heads = a.x_THw.dim(1), width = a.x_THw.dim(2), r = a.cos_sin_Pr.dim(1);
  for (int64_t t = begin; t < end; ++t) {
    const int32_t pos = a.pos_T.ptr<int32_t>()[t];
    MOEBIUS_ASSERT(0 <= pos && pos < a.cos_sin_Pr.dim(0));
    T* row = a.x_THw.ptr<T>() + t * heads * width;
    for (int64_t h = 0; h < heads; ++h) {
      rotate(row + (h + 1) * width - r, a.cos_sin_Pr.ptr<float>() + pos * r, r / 2, a.interleaved,
             a.transposed ? -1.0f : 1.0f);
    }
  }
}

template <class T>
void put_together(const LatentKvFwd& a, int64_t begin, int64_t end) {
  const int64_t heads = a.k_THd.dim(1), d = a.k_THd.dim(2), v = a.v_THv.dim(2), r = a.k_rope_Tr.dim(1), n = d - r;
  for (int64_t th = begin * heads; th < end * heads; ++th) {
    const T* kv = a.kv_THw.ptr<T>() + th * (n + v);
    T* k = a.k_THd.ptr<T>() + th * d;
    std::memcpy(k, kv, n * sizeof(T));
    std::memcpy(k + n, a.k_rope_Tr.ptr<T>() + th / heads * r, r * sizeof(T));
    std::memcpy(a.v_THv.ptr<T>() + th * v, kv + n, v * sizeof(T));
  }
}

template <class T>
void take_apart(const LatentKvBwd& a, int64_t begin, int64_t end) {
  const int64_t heads = a.dk_THd.dim(1), d = a.dk_THd.dim(2), v = a.dv_THv.dim(2), r = a.dk_rope_Tr.dim(1), n = d - r;
  for (int64_t th = begin * heads; th < end * heads; ++th) {
    T* dkv = a.dkv_THw.ptr<T>() + th * (n + v);
    std::memcpy(dkv, a.dk_THd.ptr<T>() + th * d, n * sizeof(T));
    std::memcpy(dkv + n, a.dv_THv.ptr<T>() + th * v, v * sizeof(T));
  }
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < r; ++i) {
      float sum = 0;
      for (int64_t h = 0; h < heads; ++h) sum += to_f32(a.dk_THd.ptr<T>()[(t * heads + h) * d + n + i]);
      a.dk_rope_Tr.ptr<T>()[t * r + i] = from_f32<T>(sum);
    }
  }
}

}  // namespace

void rotate_heads(Stream& s, const RotateHeads& a) {
  with_float_type(a.x_THw.dtype, [&](auto zero) {
    parallel_rows(s.pool(), a.x_THw.dim(0), kRows,
                  [&](int64_t begin, int64_t end) { rotate_rows<decltype(zero)>(a, begin, end); });
  });
}

void latent_kv_fwd(Stream& s, const LatentKvFwd& a) {
  with_float_type(a.k_THd.dtype, [&](auto zero) {
    parallel_rows(s.pool(), a.k_THd.dim(0), kRows,
                  [&](int64_t begin, int64_t end) { put_together<decltype(zero)>(a, begin, end); });
  });
}

void latent_kv_bwd(Stream& s, const LatentKvBwd& a) {
  with_float_type(a.dk_THd.dtype, [&](auto zero) {
    parallel_rows(s.pool(), a.dk_THd.dim(0), kRows,
                  [&](int64_t begin, int64_t end) { take_apart<decltype(zero)>(a, begin, end); });
  });
}

}  // namespace moebius::cpu

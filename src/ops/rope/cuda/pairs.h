// Heads that rope_fwd, its backward pass and the attention of one token rotate: the pairs of a lane.
#pragma once

#include "ops/cuda/vector.h"

namespace moebius::cuda {

// A head is the work of a group of num_lanes lanes (a power of two). A lane has kVectors times kNum
// pairs (i, i + d/2).
struct Heads {
  int64_t rows, positions;
  int heads, kv_heads, width, num_lanes;
  float eps;
  const int32_t* pos;
  const float* cos_sin;

  __host__ __device__ int per_row() const { return heads + 2 * kv_heads; }
};

// The pairs of one lane.
template <int kNum, int kVectors>
struct Pairs {
  float a[kVectors][kNum], b[kVectors][kNum];

  // The pairs in the dtype that they have in memory.
  template <class T>
  struct InMemory {
    Raw<T, kNum> a[kVectors], b[kVectors];
  };
  template <class T>
  static __device__ __forceinline__ InMemory<T> fetch_from(const T* x, const Heads& g, int lane, bool valid = true) {
    InMemory<T> raw;
    const int half = g.width / 2;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = (v * g.num_lanes + lane) * kNum;
      raw.a[v] = fetch<kNum>(x + i, valid && i < half);
      raw.b[v] = fetch<kNum>(x + half + i, valid && i < half);
    }
    return raw;
  }
  template <class T>
  static __device__ __forceinline__ Pairs of(const InMemory<T>& raw) {
    Pairs p;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      unpack<T>(p.a[v], raw.a[v]);
      unpack<T>(p.b[v], raw.b[v]);
    }
    return p;
  }
  template <class T>
  __device__ __forceinline__ void store_to(T* y, const Heads& g, int lane) const {
    const int half = g.width / 2;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = (v * g.num_lanes + lane) * kNum;
      if (i >= half) continue;
      store(y + i, a[v]);
      store(y + half + i, b[v]);
    }
  }
  // Rotates by the angles of cos and sin; with sign = -1 it rotates back.
  __device__ __forceinline__ void turn(const Pairs& cos_sin, float sign) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) {
        const float x = a[v][j], y = b[v][j], cos = cos_sin.a[v][j], sin = sign * cos_sin.b[v][j];
        a[v][j] = x * cos - y * sin;
        b[v][j] = y * cos + x * sin;
      }
    }
  }
  __device__ __forceinline__ float dot(const Pairs& other) const {
    float sum = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) sum += a[v][j] * other.a[v][j] + b[v][j] * other.b[v][j];
    }
    return sum;
  }
  __device__ __forceinline__ void add_products(const Pairs& x, const Pairs& y) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) {
        a[v][j] += x.a[v][j] * y.a[v][j];
        b[v][j] += x.b[v][j] * y.b[v][j];
      }
    }
  }
  // Calls fn(own number, the other's number) for each number.
  template <class F>
  __device__ __forceinline__ void each(const Pairs& other, F&& fn) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < kNum; ++j) {
        fn(a[v][j], other.a[v][j]);
        fn(b[v][j], other.b[v][j]);
      }
    }
  }
};

template <int kNum, int kVectors>
__device__ __forceinline__ Pairs<kNum, kVectors> angles_of(const Heads& g, int64_t t, int lane) {
  const int32_t pos = g.pos[t];
  require(0 <= pos && pos < g.positions);
  using P = Pairs<kNum, kVectors>;
  return P::of(P::fetch_from(g.cos_sin + int64_t{pos} * g.width, g, lane));
}

}  // namespace moebius::cuda

// The values that an update changes, in the forms in which they are stored (ops/optimizer/rounding.h), in blocks that
// stay in the cache.
#pragma once

#include <algorithm>

#include "core/block_code.h"
#include "core/philox.h"
#include "core/rng.h"
#include "ops/cpu/vector.h"
#include "ops/optimizer/optimizer.h"
#include "ops/optimizer/rounding.h"

namespace moebius::cpu {

inline constexpr int64_t kBlock = kCodeBlock;

// The draws of a block's elements.
class DrawnBits {
 public:
  DrawnBits(const RoundingDraws& of, int64_t step)
      : of_(of), words_(Rng(of.seed, RngSite::rounding, static_cast<uint64_t>(step), of.key).words()) {}

  void fill(int64_t begin, int64_t n) {
    for (int64_t i = 0; i < n;) {
      const int64_t at = of_.begin + begin + i, inside = at % of_.run, count = std::min(of_.run - inside, n - i);
      const int64_t first = of_.first + at / of_.run * of_.stride + inside;
      draw(static_cast<uint64_t>(first), i, count);
      i += count;
    }
  }

  uint32_t m[kBlock], v[kBlock], weight[kBlock];

 private:
  // Draws for the elements i to i + count of the block, whose global index begins with `first`.
  void draw(uint64_t first, int64_t i, int64_t count) {
    const Rng::Words words = words_;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const uint64_t index = first + static_cast<uint64_t>(j);
      uint32_t a = static_cast<uint32_t>(index), b = static_cast<uint32_t>(index >> 32);
      uint32_t c = words.counter_high[0], d = words.counter_high[1];
      philox_rounds(a, b, c, d, words.key[0], words.key[1]);
      m[i + j] = a & 0xffffu;
      v[i + j] = a >> 16;
      weight[i + j] = b & 0xffffu;
    }
  }

  const RoundingDraws& of_;
  Rng::Words words_;
};

inline void load(float* to, const Tensor& from, int64_t begin, int64_t n) {
  with_float_type(from.dtype, [&]<class T>(T) {
    const T* x = from.ptr<T>() + begin;
    for (int64_t i = 0; i < n; ++i) to[i] = to_f32(x[i]);
  });
}

inline void store(const Tensor& to, const float* from, const uint32_t* draws, int64_t begin, int64_t n) {
  if (to.dtype == DType::f32) {
    std::copy_n(from, n, to.ptr<float>() + begin);
    return;
  }
  bf16* x = to.ptr<bf16>() + begin;
  for (int64_t i = 0; i < n; ++i) x[i] = to_bf16_stochastic(from[i], draws[i]);
}

inline void join(float* master, const bf16* weight, const uint16_t* remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) master[i] = joined(weight[i], remainder[i]);
}

// remainder may be null.
inline void split_all(bf16* weight, uint16_t* remainder, const float* master, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const auto [high, low] = split(master[i]);
    weight[i] = high;
    if (remainder) remainder[i] = low;
  }
}

inline void load_master(float* to, const UpdatedTensor& t, int64_t begin, int64_t n) {
  if (t.remainder_n.empty()) return load(to, t.master_n.empty() ? t.param_n : t.master_n, begin, n);
  join(to, t.param_n.ptr<bf16>() + begin, t.remainder_n.ptr<uint16_t>() + begin, n);
}

inline void store_master(const UpdatedTensor& t, const float* from, const uint32_t* draws, int64_t begin, int64_t n) {
  if (!t.remainder_n.empty())
    return split_all(t.param_n.ptr<bf16>() + begin, t.remainder_n.ptr<uint16_t>() + begin, from, n);
  if (t.master_n.empty()) return store(t.param_n, from, draws, begin, n);
  std::copy_n(from, n, t.master_n.ptr<float>() + begin);
  with_float_type(t.param_n.dtype, [&]<class T>(T) {
    T* param = t.param_n.ptr<T>() + begin;
    for (int64_t i = 0; i < n; ++i) param[i] = from_f32<T>(from[i]);
  });
}

}  // namespace moebius::cpu

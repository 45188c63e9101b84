#include "ops/elementwise/elementwise.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numbers>

#include "ops/cpu/vector.h"
#include "ops/elementwise/elementwise_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements of a task
constexpr int64_t kRows = 32;

float draw_of(const FillNormal& a, uint64_t index) {
  return a.uniform ? std::numbers::sqrt3_v<float> * (2.0f * a.rng.uniform(index) - 1.0f) : a.rng.normal(index);
}

template <class To, class From>
void convert(ThreadPool& pool, To* to, const From* from, int64_t n) {
  parallel_rows(pool, n, kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) to[i] = from_f32<To>(to_f32(from[i]));
  });
}

// Computes y[i] = fn(x[i], i) for each element, in f32.
template <class F>
void map(Stream& s, Tensor y, Tensor x, F&& fn) {
  with_float_type(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* to = y.ptr<T>();
    const T* from = x.ptr<T>();
    parallel_rows(s.pool(), x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = from_f32<T>(fn(to_f32(from[i]), i));
    });
  });
}

template <class T>
void gated_add_row(T* y, const T* x, float gate, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) y[j] = from_f32<T>(to_f32(y[j]) + gate * to_f32(x[j]));
}

// Computes dx = gate dy, and returns <dy, x>.
template <class T>
float gated_add_bwd_row(T* dx, const T* dy, const T* x, float gate, int64_t width) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < width; ++j) {
    sum += to_f32(dy[j]) * to_f32(x[j]);
    dx[j] = from_f32<T>(gate * to_f32(dy[j]));
  }
  return sum;
}

}  // namespace

void fill_zero(Stream& s, Tensor x) {
  parallel_rows(s.pool(), x.num_bytes(), kGrain * 4,
                [&](int64_t begin, int64_t end) { std::memset(static_cast<char*>(x.data) + begin, 0, end - begin); });
}

void fill_zeros(Stream& s, std::span<const Tensor> x) {
  for (const Tensor& each : x)
    if (!each.empty()) cpu::fill_zero(s, each);
}

void copy(Stream& s, Tensor to, Tensor from) {
  if (to.dtype == DType::bf16 && from.dtype == DType::f32)
    return convert(s.pool(), to.ptr<bf16>(), from.ptr<float>(), to.numel());
  if (to.dtype == DType::f32 && from.dtype == DType::bf16)
    return convert(s.pool(), to.ptr<float>(), from.ptr<bf16>(), to.numel());
  parallel_rows(s.pool(), to.num_bytes(), kGrain * 4, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to.data) + begin, static_cast<const char*>(from.data) + begin, end - begin);
  });
}

void add(Stream& s, Tensor y, Tensor x) {
  const auto add_all = [&]<class Y, class X>(Y* sum, const X* term) {
    parallel_rows(s.pool(), x.numel(), kGrain, [&](int64_t begin, int64_t end) {
#pragma omp simd
      for (int64_t i = begin; i < end; ++i) sum[i] = from_f32<Y>(to_f32(sum[i]) + to_f32(term[i]));
    });
  };
  if (y.dtype != x.dtype) return add_all(y.ptr<bf16>(), x.ptr<float>());
  with_float_type(x.dtype, [&]<class T>(T) { add_all(y.ptr<T>(), static_cast<const T*>(x.ptr<T>())); });
}

void add_row(Stream& s, Tensor y_SD, Tensor row_1D) {
  const int64_t D = row_1D.dim(1);
  with_float_type(y_SD.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* row = row_1D.ptr<T>();
    parallel_rows(s.pool(), y_SD.dim(0), 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T* y = y_SD.ptr<T>() + i * D;
#pragma omp simd
        for (int64_t d = 0; d < D; ++d) y[d] = from_f32<T>(to_f32(y[d]) + to_f32(row[d]));
      }
    });
  });
}

void sum_rows(Stream& s, const SumRows& a) {
  const int64_t T = a.x_TC.dim(0), C = a.x_TC.dim(1), num_blocks = div_ceil(T, SumRows::kRowsOfBlock);
  float* const partial = static_cast<float*>(a.scratch.data);
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    const auto* x = a.x_TC.ptr<decltype(zero)>();
    parallel_rows(s.pool(), num_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        float* sum = partial + block * C;
        std::fill(sum, sum + C, 0.0f);
        const int64_t last = std::min(T, (block + 1) * SumRows::kRowsOfBlock);
        for (int64_t t = block * SumRows::kRowsOfBlock; t < last; ++t) {
#pragma omp simd
          for (int64_t c = 0; c < C; ++c) sum[c] += to_f32(x[t * C + c]);
        }
      }
    });
  });
  float* sum = a.sum_C.ptr<float>();
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int64_t c = 0; c < C; ++c) sum[c] += partial[block * C + c];
  }
}

void copy_columns(Stream& s, const CopyColumns& a) {
  const int64_t size = size_of(a.to_TA.dtype), to_row = a.to_TA.dim(1) * size, from_row = a.from_TB.dim(1) * size;
  char* to = static_cast<char*>(a.to_TA.data) + a.to_first * size;
  const char* from = static_cast<const char*>(a.from_TB.data) + a.from_first * size;
  parallel_rows(s.pool(), a.to_TA.dim(0), 128, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) std::memcpy(to + t * to_row, from + t * from_row, a.count * size);
  });
}

// It uses one thread, since it sums losses and other arrays of a few thousand values.
void sum_into(Stream&, const SumInto& a) {
  const float* x = a.x.ptr<float>();
  const int64_t n = a.x.numel();
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  *a.out_1.ptr<double>() += a.scale * sum;
}

void gated_add_fwd(Stream& s, const GatedAddFwd& a) {
  const int64_t width = a.x_TD.dim(1);
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_rows(s.pool(), a.x_TD.dim(0), kRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        gated_add_row(a.y_TD.ptr<T>() + t * width, a.x_TD.ptr<T>() + t * width, sigmoid_f32(a.gate_T.ptr<float>()[t]),
                      width);
      }
    });
  });
}

void gated_add_bwd(Stream& s, const GatedAddBwd& a) {
  const int64_t width = a.x_TD.dim(1);
  with_float_type(a.x_TD.dtype, [&](auto zero) {
    using T = decltype(zero);
    parallel_rows(s.pool(), a.x_TD.dim(0), kRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float gate = sigmoid_f32(a.gate_T.ptr<float>()[t]);
        const float sum = gated_add_bwd_row(a.dx_TD.ptr<T>() + t * width, a.dy_TD.ptr<T>() + t * width,
                                            a.x_TD.ptr<T>() + t * width, gate, width);
        a.dgate_T.ptr<float>()[t] = gate * (1.0f - gate) * sum;
      }
    });
  });
}

void jitter(Stream& s, const Jitter& a) {
  const int64_t* draw = a.draw_2.ptr<int64_t>();
  const Rng rng(a.seed, RngSite::jitter, static_cast<uint64_t>(draw[0]), a.layer);
  const auto first = static_cast<uint64_t>((draw[1] + a.row) * a.x_TD.dim(1));
  map(s, a.y_TD, a.x_TD,
      [&](float x, int64_t i) { return x * (1.0f + a.eps * (2.0f * rng.uniform(first + i) - 1.0f)); });
}

void fill_normal(Stream& s, const FillNormal& a) {
  with_float_type(a.x.dtype, [&](auto zero) {
    using T = decltype(zero);
    T* x = a.x.ptr<T>();
    parallel_rows(s.pool(), a.x.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) x[i] = from_f32<T>(a.mean + a.std * draw_of(a, a.first_index + i));
    });
  });
}

int64_t find_nonfinite(Stream& s, Tensor x) {
  std::atomic<int64_t> first{x.numel()};
  with_float_type(x.dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* p = x.ptr<T>();
    parallel_rows(s.pool(), x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      const int64_t i = std::find_if(p + begin, p + end, [](T v) { return !std::isfinite(to_f32(v)); }) - p;
      if (i == end) return;
      int64_t seen = first;
      while (i < seen && !first.compare_exchange_weak(seen, i)) {
      }
    });
  });
  return first == x.numel() ? -1 : first.load();
}

}  // namespace moebius::cpu

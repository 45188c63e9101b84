#include <algorithm>
#include <cmath>

#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_sink.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

// Returns log(e^a + e^b). At most one of them may be minus infinity.
float log_sum(float a, float b) { return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b))); }

template <class T>
float product(const T* x, const T* y, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += to_f32(x[i]) * to_f32(y[i]);
  return sum;
}

}  // namespace

void attention_sink_fwd(Stream& s, const AttentionSinkFwd& a) {
  const int64_t heads = a.o_THd.dim(1), width = a.o_THd.dim(2);
  with_float_type(a.o_THd.dtype, [&]<class T>(T) {
    parallel_rows(s.pool(), a.lse_TH.numel(), 64, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float& lse = a.lse_TH.ptr<float>()[i];
        const float sink = a.sink_H.ptr<float>()[i % heads];
        const float kept = 1.0f / (1.0f + std::exp(sink - lse));  // e^(lse - lse'), without their difference
        lse = log_sum(lse, sink);
        T* o = a.o_THd.ptr<T>() + i * width;
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) o[c] = from_f32<T>(kept * to_f32(o[c]));
      }
    });
  });
}

// A task is a head, so that its sum runs over the rows in order.
void attention_sink_bwd(Stream& s, const AttentionSinkBwd& a) {
  const int64_t rows = a.o_THd.dim(0), heads = a.o_THd.dim(1), width = a.o_THd.dim(2);
  with_float_type(a.o_THd.dtype, [&]<class T>(T) {
    s.pool().run(heads, [&](int64_t h, int) {
      const float sink = a.sink_H.ptr<float>()[h];
      float sum = 0;
      for (int64_t i = h; i < rows * heads; i += heads) {
        const float p = std::exp(sink - a.lse_TH.ptr<float>()[i]);
        sum += p * product(a.do_THd.ptr<T>() + i * width, a.o_THd.ptr<T>() + i * width, width);
      }
      a.dsink_H.ptr<float>()[h] -= sum;
    });
  });
}

}  // namespace moebius::cpu

#include "train/bench_timing.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise/elementwise.h"

namespace moebius {

Tensor BenchTensors::zeros(Shape shape, DType dtype) {
  const Buffer& buffer = buffers_.emplace_back(s_.device(), shape.numel() * size_of(dtype));
  return {.data = buffer.data(), .shape = shape, .dtype = dtype, .device = s_.device()};
}

Tensor BenchTensors::normal(Shape shape, DType dtype, float std) {
  const Tensor t = zeros(shape, dtype);
  fill_normal(s_, {.x = t, .rng = Rng(1, RngSite::bench, 0, static_cast<uint32_t>(buffers_.size())), .std = std});
  return t;
}

double element(const Tensor& t, int64_t index) {
  return t.dtype == DType::f32 ? t.ptr<float>()[index] : to_f32(t.ptr<bf16>()[index]);
}

std::vector<int64_t> sampled(int64_t of) {
  std::vector<int64_t> rows{0, of / 3, of / 2, of - 1};
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

int64_t scaled(int64_t size, double scale) {
  return std::max<int64_t>(1, std::llround(static_cast<double>(size) * scale));
}

void time_runs(BenchLine& line, int64_t runs, const std::function<void()>& body) {
  body();  // first touch of memory, code and kernels made on demand
  std::vector<double> ms;
  for (int64_t i = 0; i < runs; ++i) {
    const double begin = now_us();
    body();
    ms.push_back((now_us() - begin) / 1e3);
  }
  std::sort(ms.begin(), ms.end());
  line.median_ms = ms[ms.size() / 2];
  line.min_ms = ms[0];
  line.runs = runs;
}

void check_sum(const BenchLine& line, double tolerance) {
  MOEBIUS_CHECK(numerics, std::abs(line.checksum - line.expected) <= tolerance,
                "bench {}: expected checksum {:.6g} within {:.1g}; got {:.6g}; the result is wrong", line.name,
                line.expected, tolerance, line.checksum);
}

double rounding(DType dtype, double n, double magnitude) {
  return (dtype == DType::bf16 ? 0x1p-8 : 0x1p-20) * std::sqrt(n) * magnitude * 8;
}

}  // namespace moebius

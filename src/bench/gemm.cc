#include <cmath>

#include "bench/check.h"
#include "bench/timing.h"
#include "ops/gemm/gemm_desc.h"
#include "ops/gemm/gemm_device.h"

namespace moebius {
namespace {

using Product = void (*)(Stream&, const Gemm&);

BenchLine gemm_line(BenchDevice& device, double scale, const char* name, Product multiply, DType dtype) {
  Stream& s = device.stream();
  BenchTensors tensors(s);
  const int64_t n = device.matrix_size(scale);
  const Gemm product{.c_MN = tensors.zeros({n, n}, dtype),
                     .a = tensors.normal({n, n}, dtype, 1.0f),
                     .b = tensors.normal({n, n}, dtype, 1.0f),
                     .trans_b = true};
  BenchLine line{.name = fmt::format("{}_{}_{}", name, name_of(dtype), n), .cost = cost(product)};
  device.time(line, [&] { multiply(s, product); });
  if (device.is_gpu())
    line.kernel = fmt::format("{}; {}", to_string(describe(product)), gemm_algorithm_text(s, product));
  const std::vector<int64_t> at = sampled(n);
  BenchSample sample;
  for (const int64_t r : at) {
    const HostRows c(s, product.c_MN, r, 1), a(s, product.a.data, r, 1);
    for (const int64_t i : at) sample.add(c.at(r, i), dot(a, r, HostRows(s, product.b.data, i, 1), i));
  }
  check_sample(line, "c", sample, dtype == DType::bf16 ? kBf16Tolerance : kF32Tolerance);
  return line;
}

}  // namespace

BenchReport bench_gemm(const BenchSpec& spec) {
  BenchDevice device(spec);
  BenchReport report{.ceilings = device.measure_ceilings(spec.scale)};
  for (const DType dtype : {DType::bf16, DType::f32}) {
    report.lines.push_back(gemm_line(device, spec.scale, "gemm", gemm, dtype));
    if (!device.is_gpu() && onednn_multiplies(dtype))
      report.lines.push_back(gemm_line(device, spec.scale, "onednn", gemm_by_onednn, dtype));
  }
  for (BenchLine& line : report.lines) line.roofline_ms = roofline_ms({line.cost}, report.ceilings);
  return report;
}

}  // namespace moebius

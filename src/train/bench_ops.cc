#include <cmath>

#include "ops/attention/attention.h"
#include "ops/gemm/gemm.h"
#include "train/bench_timing.h"

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
  const std::vector<int64_t> sample = sampled(n);
  for (const int64_t r : sample) {
    const HostRows c(s, product.c_MN, r, 1), a(s, product.a, r, 1);
    for (const int64_t i : sample) {
      line.checksum += c.at(r, i);
      line.expected += dot(a, r, HostRows(s, product.b, i, 1), i);
    }
  }
  check_sum(line,
            rounding(dtype, static_cast<double>(sample.size() * sample.size()), std::sqrt(static_cast<double>(n))));
  return line;
}

// Query head h of row t, in plain loops; sum over the head's outputs.
double attention_sum(Stream& s, const AttentionFwd& a, int64_t t, int64_t h) {
  const int64_t H = a.q_THd.dim(1), G = a.k_UGd.dim(1), S = a.q_THd.dim(0) / a.batch, g = h / (H / G),
                first = t / S * S;
  const HostRows q(s, a.q_THd, t * H + h, 1), k(s, a.k_UGd, first * G, (t + 1 - first) * G),
      v(s, a.v_UGd, first * G, (t + 1 - first) * G);
  double largest = -INFINITY, total = 0, sum = 0;
  std::vector<double> score;
  for (int64_t u = first; u <= t; ++u) {
    score.push_back(a.scale * dot(q, t * H + h, k, u * G + g));
    largest = std::max(largest, score.back());
  }
  for (int64_t u = first; u <= t; ++u) {
    const double p = std::exp(score[u - first] - largest);
    total += p;
    for (int64_t i = 0; i < v.columns(); ++i) sum += p * v.at(u * G + g, i);
  }
  return sum / total;
}

double sum_of(const HostRows& rows, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; i < rows.columns(); ++i) sum += rows.at(r, i);
  }
  return sum;
}

BenchLine forward_line(BenchDevice& device, BenchTensors& tensors, AttentionFwd& fwd) {
  Stream& s = device.stream();
  const int64_t T = fwd.q_THd.dim(0), H = fwd.q_THd.dim(1), d = fwd.q_THd.dim(2);
  fwd.scratch = tensors.bytes(AttentionFwd::scratch_bytes(fwd, s));
  BenchLine line{.name = "attention_fwd", .cost = cost(fwd)};
  device.time(line, [&] { attention_fwd(s, fwd); });
  for (const int64_t t : sampled(T)) {
    for (const int64_t h : sampled(H)) {
      line.expected += attention_sum(s, fwd, t, h);
      line.checksum += sum_of(HostRows(s, fwd.o_THd, t * H + h, 1), t * H + h, t * H + h + 1);
    }
  }
  check_sum(line, rounding(DType::bf16, static_cast<double>(16 * d), 1.0));
  return line;
}

BenchLine backward_line(BenchDevice& device, BenchTensors& tensors, AttentionBwd& bwd) {
  Stream& s = device.stream();
  const int64_t T = bwd.q_THd.dim(0), H = bwd.q_THd.dim(1), G = bwd.k_TGd.dim(1), d = bwd.q_THd.dim(2),
                S = T / bwd.batch;
  bwd.scratch = tensors.bytes(AttentionBwd::scratch_bytes(bwd, s));
  BenchLine line{.name = "attention_bwd", .cost = cost(bwd)};
  device.time(line, [&] { attention_bwd(s, bwd); });
  // Each row of probabilities sums to one, so dv summed over the keys of a sequence is do summed over its queries.
  line.checksum = sum_of(HostRows(s, bwd.dv_TGd, 0, S * G), 0, S * G);
  line.expected = sum_of(HostRows(s, bwd.do_THd, 0, S * H), 0, S * H);
  check_sum(line, rounding(DType::bf16, static_cast<double>(S * H * d), 1.0));
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

BenchReport bench_attention(const BenchSpec& spec) {
  const BenchShape shape = bench_shape(spec.shape, spec.scale);
  MOEBIUS_CHECK(usage, shape.H > 0, "bench attention: --shape: {} has no attention of this kind", shape.name);
  BenchDevice device(spec);
  BenchTensors tensors(device.stream());
  const int64_t T = shape.T(), H = shape.H, G = shape.G, d = shape.head;
  const DType dtype = DType::bf16;
  AttentionFwd fwd{.o_THd = tensors.zeros({T, H, d}, dtype),
                   .lse_TH = tensors.zeros({T, H}, DType::f32),
                   .q_THd = tensors.normal({T, H, d}, dtype, 1.0f),
                   .k_UGd = tensors.normal({T, G, d}, dtype, 1.0f),
                   .v_UGd = tensors.normal({T, G, d}, dtype, 1.0f),
                   .batch = shape.batch,
                   .scale = 1.0f / std::sqrt(static_cast<float>(d))};
  AttentionBwd bwd{.dq_THd = tensors.zeros({T, H, d}, dtype),
                   .dk_TGd = tensors.zeros({T, G, d}, dtype),
                   .dv_TGd = tensors.zeros({T, G, d}, dtype),
                   .do_THd = tensors.normal({T, H, d}, dtype, 1.0f),
                   .o_THd = fwd.o_THd,
                   .lse_TH = fwd.lse_TH,
                   .q_THd = fwd.q_THd,
                   .k_TGd = fwd.k_UGd,
                   .v_TGd = fwd.v_UGd,
                   .batch = shape.batch,
                   .scale = fwd.scale};
  BenchReport report{.ceilings = device.measure_ceilings(spec.scale)};
  report.lines.push_back(forward_line(device, tensors, fwd));
  report.lines.push_back(backward_line(device, tensors, bwd));
  for (BenchLine& line : report.lines) line.roofline_ms = roofline_ms({line.cost}, report.ceilings);
  return report;
}

}  // namespace moebius

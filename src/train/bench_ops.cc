#include <cmath>

#include "ops/attention/attention.h"
#include "ops/gemm/gemm.h"
#include "train/bench_timing.h"

namespace moebius {
namespace {

using Product = void (*)(Stream&, const Gemm&);

BenchLine gemm_line(const BenchSpec& spec, const char* name, Product multiply, DType dtype) {
  ThreadPool pool(spec.threads);
  Stream s(DeviceKind::cpu, pool);
  BenchTensors tensors(s);
  const int64_t n = scaled(2048, spec.scale);
  const Gemm product{.c_MN = tensors.zeros({n, n}, dtype),
                     .a = tensors.normal({n, n}, dtype, 1.0f),
                     .b = tensors.normal({n, n}, dtype, 1.0f),
                     .trans_b = true};
  BenchLine line{.name = fmt::format("{}_{}_{}", name, name_of(dtype), n), .cost = cost(product)};
  time_runs(line, spec.runs, [&] { multiply(s, product); });
  const std::vector<int64_t> rows = sampled(n);
  for (const int64_t r : rows) {
    for (int64_t c = 0; c < n; ++c) {
      line.checksum += element(product.c_MN, r * n + c);
      for (int64_t k = 0; k < n; ++k) line.expected += element(product.a, r * n + k) * element(product.b, c * n + k);
    }
  }
  check_sum(line, rounding(dtype, static_cast<double>(rows.size() * n), std::sqrt(static_cast<double>(n))));
  return line;
}

// Query head h of row t of the last sequence rows, in plain loops; sum over the head's outputs.
double attention_sum(const AttentionFwd& a, int64_t t, int64_t h) {
  const int64_t H = a.q_THd.dim(1), G = a.k_UGd.dim(1), d = a.q_THd.dim(2), S = a.q_THd.dim(0) / a.batch,
                g = h / (H / G), first = t / S * S;
  double largest = -INFINITY, total = 0, sum = 0;
  std::vector<double> score;
  for (int64_t u = first; u <= t; ++u) {
    double dot = 0;
    for (int64_t i = 0; i < d; ++i)
      dot += element(a.q_THd, (t * H + h) * d + i) * element(a.k_UGd, (u * G + g) * d + i);
    score.push_back(a.scale * dot);
    largest = std::max(largest, score.back());
  }
  for (int64_t u = first; u <= t; ++u) {
    const double p = std::exp(score[u - first] - largest);
    total += p;
    for (int64_t i = 0; i < d; ++i) sum += p * element(a.v_UGd, (u * G + g) * d + i);
  }
  return sum / total;
}

}  // namespace

std::vector<BenchLine> bench_gemm(const BenchSpec& spec) {
  std::vector<BenchLine> lines;
  for (const DType dtype : {DType::bf16, DType::f32}) {
    lines.push_back(gemm_line(spec, "gemm", gemm, dtype));
    lines.push_back(gemm_line(spec, "onednn", gemm_by_onednn, dtype));
  }
  return lines;
}

std::vector<BenchLine> bench_attention(const BenchSpec& spec) {
  ThreadPool pool(spec.threads);
  Stream s(DeviceKind::cpu, pool);
  BenchTensors tensors(s);
  const int64_t B = 8, S = scaled(512, spec.scale), T = B * S, H = 8, G = 4, d = 64;
  const DType dtype = DType::bf16;
  AttentionFwd fwd{.o_THd = tensors.zeros({T, H, d}, dtype),
                   .lse_TH = tensors.zeros({T, H}, DType::f32),
                   .q_THd = tensors.normal({T, H, d}, dtype, 1.0f),
                   .k_UGd = tensors.normal({T, G, d}, dtype, 1.0f),
                   .v_UGd = tensors.normal({T, G, d}, dtype, 1.0f),
                   .batch = B,
                   .scale = 1.0f / std::sqrt(static_cast<float>(d))};
  fwd.scratch = tensors.bytes(AttentionFwd::scratch_bytes(fwd, s));
  BenchLine forward{.name = "attention_fwd", .cost = cost(fwd)};
  time_runs(forward, spec.runs, [&] { attention_fwd(s, fwd); });
  for (const int64_t t : sampled(T)) {
    for (int64_t h = 0; h < H; ++h) {
      forward.expected += attention_sum(fwd, t, h);
      for (int64_t i = 0; i < d; ++i) forward.checksum += element(fwd.o_THd, (t * H + h) * d + i);
    }
  }
  check_sum(forward, rounding(dtype, static_cast<double>(4 * H * d), 1.0));

  AttentionBwd bwd{.dq_THd = tensors.zeros({T, H, d}, dtype),
                   .dk_TGd = tensors.zeros({T, G, d}, dtype),
                   .dv_TGd = tensors.zeros({T, G, d}, dtype),
                   .do_THd = tensors.normal({T, H, d}, dtype, 1.0f),
                   .o_THd = fwd.o_THd,
                   .lse_TH = fwd.lse_TH,
                   .q_THd = fwd.q_THd,
                   .k_TGd = fwd.k_UGd,
                   .v_TGd = fwd.v_UGd,
                   .batch = B,
                   .scale = fwd.scale};
  bwd.scratch = tensors.bytes(AttentionBwd::scratch_bytes(bwd, s));
  BenchLine backward{.name = "attention_bwd", .cost = cost(bwd)};
  time_runs(backward, spec.runs, [&] { attention_bwd(s, bwd); });
  // Each row of probabilities sums to one, so dv summed over all keys is do summed over all queries.
  for (int64_t i = 0; i < T * G * d; ++i) backward.checksum += element(bwd.dv_TGd, i);
  for (int64_t i = 0; i < T * H * d; ++i) backward.expected += element(bwd.do_THd, i);
  check_sum(backward, rounding(dtype, static_cast<double>(T * H * d), 1.0));
  return {forward, backward};
}

}  // namespace moebius

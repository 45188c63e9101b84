#include <algorithm>
#include <cmath>

#include "ops/experts/experts.h"
#include "train/bench_timing.h"

namespace moebius {
namespace {

// Inputs of all expert ops: T tokens, each to K of E experts at random.
struct Experts {
  int64_t T, D, F, E, R;
  Tensor x_TD, dout_TD, w1_e2FD, w2_eDF;
  Tensor h_R2F, a_RF, y_RD, dh_R2F, sa_RF, dx_RD, weight_R, dweight_R, dw1_e2FD, dw2_eDF;
  Rows rows;
  int64_t expert_of(int64_t row) const {
    const int32_t* offsets = rows.offsets_e1.ptr<int32_t>();
    return std::upper_bound(offsets, offsets + E + 1, row) - offsets - 1;
  }
  int64_t token_of(int64_t row) const { return rows.token_R.ptr<int32_t>()[row]; }
};

void route_at_random(Experts& c, int64_t K) {
  const Rng rng(2, RngSite::bench);
  std::vector<std::pair<int64_t, int64_t>> pairs;  // expert, token
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t first = static_cast<int64_t>(rng.below(t, c.E));
    for (int64_t k = 0; k < K; ++k) pairs.emplace_back((first + k * 5) % c.E, t);
  }
  std::sort(pairs.begin(), pairs.end());
  for (int64_t r = 0; r < c.R; ++r) {
    c.rows.token_R.ptr<int32_t>()[r] = static_cast<int32_t>(pairs[r].second);
    for (int64_t e = pairs[r].first; e < c.E; ++e) ++c.rows.offsets_e1.ptr<int32_t>()[e + 1];
  }
}

Experts make_experts(BenchTensors& t, double scale) {
  const int64_t K = 2;
  Experts c{.T = scaled(4096, scale), .D = scaled(512, scale), .F = scaled(1024, scale), .E = 16};
  c.R = c.T * K;
  const DType dtype = DType::bf16;
  const float std_D = 1.0f / std::sqrt(static_cast<float>(c.D)), std_F = 1.0f / std::sqrt(static_cast<float>(c.F));
  c.x_TD = t.normal({c.T, c.D}, dtype, 1.0f);
  c.dout_TD = t.normal({c.T, c.D}, dtype, 1.0f);
  c.w1_e2FD = t.normal({c.E, 2 * c.F, c.D}, dtype, std_D);
  c.w2_eDF = t.normal({c.E, c.D, c.F}, dtype, std_F);
  c.weight_R = t.normal({c.R}, DType::f32, 1.0f);
  c.h_R2F = t.zeros({c.R, 2 * c.F}, dtype);
  c.a_RF = t.zeros({c.R, c.F}, dtype);
  c.y_RD = t.zeros({c.R, c.D}, dtype);
  c.dh_R2F = t.zeros({c.R, 2 * c.F}, dtype);
  c.sa_RF = t.zeros({c.R, c.F}, dtype);
  c.dx_RD = t.zeros({c.R, c.D}, dtype);
  c.dweight_R = t.zeros({c.R}, DType::f32);
  c.dw1_e2FD = t.zeros(c.w1_e2FD.shape, DType::f32);
  c.dw2_eDF = t.zeros(c.w2_eDF.shape, DType::f32);
  c.rows = {.offsets_e1 = t.zeros({c.E + 1}, DType::i32), .token_R = t.zeros({c.R}, DType::i32)};
  route_at_random(c, K);
  return c;
}

double dot(const Tensor& a, int64_t a_at, const Tensor& b, int64_t b_at, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += element(a, a_at + i) * element(b, b_at + i);
  return sum;
}

double row_sum(const Tensor& t, int64_t row) {
  const int64_t n = t.numel() / t.dim(0);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += element(t, row * n + i);
  return sum;
}

double up_row(const Experts& c, int64_t r) {
  double sum = 0;
  for (int64_t j = 0; j < 2 * c.F; ++j)
    sum += dot(c.w1_e2FD, (c.expert_of(r) * 2 * c.F + j) * c.D, c.x_TD, c.token_of(r) * c.D, c.D);
  return sum;
}

double down_row(const Experts& c, int64_t r) {
  double sum = 0;
  for (int64_t i = 0; i < c.D; ++i) sum += dot(c.w2_eDF, (c.expert_of(r) * c.D + i) * c.F, c.a_RF, r * c.F, c.F);
  return sum;
}

// dweight = <w2^T dout, a> = <dout, w2 a>, from a as it was rounded.
double dweight_row(const Experts& c, int64_t r) {
  double sum = 0;
  for (int64_t i = 0; i < c.D; ++i) {
    sum += element(c.dout_TD, c.token_of(r) * c.D + i) *
           dot(c.w2_eDF, (c.expert_of(r) * c.D + i) * c.F, c.a_RF, r * c.F, c.F);
  }
  return sum;
}

double d_up_row(const Experts& c, int64_t r) {
  double sum = 0;
  for (int64_t j = 0; j < 2 * c.F; ++j) {
    const double dh = element(c.dh_R2F, r * 2 * c.F + j);
    double column = 0;
    for (int64_t i = 0; i < c.D; ++i) column += element(c.w1_e2FD, ((c.expert_of(r) * 2 * c.F) + j) * c.D + i);
    sum += dh * column;
  }
  return sum;
}

// The sum of all elements of  sum over r of left[r]^T right[r].
double wgrad_sum(const Experts& c, const Tensor& left, bool gather_left, const Tensor& right, bool gather_right) {
  double sum = 0;
  for (int64_t r = 0; r < c.R; ++r)
    sum += row_sum(left, gather_left ? c.token_of(r) : r) * row_sum(right, gather_right ? c.token_of(r) : r);
  return sum;
}

template <class Op>
BenchLine time_op(Stream& s, BenchTensors& tensors, const BenchSpec& spec, const char* name, Op op,
                  void (*run)(Stream&, const Op&)) {
  op.scratch = tensors.bytes(Op::scratch_bytes(op, s));
  BenchLine line{.name = name, .cost = cost(op)};
  time_runs(line, spec.runs, [&] { run(s, op); });
  return line;
}

// Sums over a few rows of the output against plain loops; magnitude: of one output.
void check_rows(BenchLine& line, const Tensor& out, double magnitude, const std::function<double(int64_t)>& expected) {
  const std::vector<int64_t> rows = sampled(out.dim(0));
  for (const int64_t r : rows) {
    line.checksum += row_sum(out, r);
    line.expected += expected(r);
  }
  check_sum(line,
            rounding(DType::bf16, static_cast<double>(static_cast<int64_t>(rows.size()) * (out.numel() / out.dim(0))),
                     magnitude));
}

// Weight gradients accumulate over the runs, the warm-up included.
void check_wgrad(BenchLine& line, const Tensor& dw, double once) {
  for (int64_t i = 0; i < dw.numel(); ++i) line.checksum += element(dw, i);
  line.expected = once * static_cast<double>(line.runs + 1);
  check_sum(line, 1e-3 * static_cast<double>(line.runs + 1) * std::sqrt(static_cast<double>(dw.numel())) +
                      1e-3 * std::abs(line.expected));
}

}  // namespace

std::vector<BenchLine> bench_experts(const BenchSpec& spec) {
  ThreadPool pool(spec.threads);
  Stream s(DeviceKind::cpu, pool);
  BenchTensors t(s);
  const Experts c = make_experts(t, spec.scale);
  const Rows own{.offsets_e1 = c.rows.offsets_e1};
  std::vector<BenchLine> lines;

  lines.push_back(time_op(
      s, t, spec, "expert_up",
      ExpertUp{.h_R2F = c.h_R2F, .a_RF = c.a_RF, .x_TD = c.x_TD, .w1_e2FD = c.w1_e2FD, .rows = c.rows}, expert_up));
  check_rows(lines.back(), c.h_R2F, 1.0, [&](int64_t r) { return up_row(c, r); });
  lines.push_back(time_op(s, t, spec, "expert_down",
                          ExpertDown{.y_RD = c.y_RD, .a_RF = c.a_RF, .w2_eDF = c.w2_eDF, .rows = own}, expert_down));
  check_rows(lines.back(), c.y_RD, 1.0, [&](int64_t r) { return down_row(c, r); });
  lines.push_back(time_op(s, t, spec, "d_expert_down",
                          DExpertDown{.dh_R2F = c.dh_R2F,
                                      .sa_RF = c.sa_RF,
                                      .dweight_R = c.dweight_R,
                                      .dout_TD = c.dout_TD,
                                      .w2_eDF = c.w2_eDF,
                                      .h_R2F = c.h_R2F,
                                      .weight_R = c.weight_R,
                                      .rows = c.rows},
                          d_expert_down));
  check_rows(lines.back(), c.dweight_R, std::sqrt(static_cast<double>(c.D)),
             [&](int64_t r) { return dweight_row(c, r); });
  lines.push_back(time_op(s, t, spec, "d_expert_up",
                          DExpertUp{.dx_RD = c.dx_RD, .dh_R2F = c.dh_R2F, .w1_e2FD = c.w1_e2FD, .rows = own},
                          d_expert_up));
  check_rows(lines.back(), c.dx_RD, 2.0, [&](int64_t r) { return d_up_row(c, r); });
  lines.push_back(time_op(
      s, t, spec, "expert_wgrad_w2",
      ExpertWgrad{.dw_eMN = c.dw2_eDF, .left_RM = c.dout_TD, .right_RN = c.sa_RF, .gather_left = true, .rows = c.rows},
      expert_wgrad));
  check_wgrad(lines.back(), c.dw2_eDF, wgrad_sum(c, c.dout_TD, true, c.sa_RF, false));
  lines.push_back(time_op(
      s, t, spec, "expert_wgrad_w1",
      ExpertWgrad{.dw_eMN = c.dw1_e2FD, .left_RM = c.dh_R2F, .right_RN = c.x_TD, .gather_right = true, .rows = c.rows},
      expert_wgrad));
  check_wgrad(lines.back(), c.dw1_e2FD, wgrad_sum(c, c.dh_R2F, false, c.x_TD, true));
  return lines;
}

}  // namespace moebius

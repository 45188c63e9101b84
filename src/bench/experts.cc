#include <algorithm>
#include <cmath>
#include <utility>

#include "bench/check.h"
#include "bench/timing.h"
#include "ops/experts/experts_backends.h"
#include "ops/experts/experts_desc.h"
#include "ops/quantize/quantize.h"

namespace moebius {
namespace {

// Inputs and outputs of all expert ops.
struct Experts {
  BenchShape shape;
  BenchRows index;
  Tensor x_TD, dout_TD, w1_e2FD, w2_eDF;
  Tensor b1_e2F, b2_eD;  // empty: the shape has no biases
  Tensor h_R2F, a_RF, y_RD, dh_R2F, sa_RF, dx_RD, weight_R, dweight_R, dw1_e2FD, dw2_eDF;
  Rows rows;
  int64_t expert_of(int64_t row) const {
    return std::upper_bound(index.offsets_E1.begin(), index.offsets_E1.end(), row) - index.offsets_E1.begin() - 1;
  }
  int64_t token_of(int64_t row) const { return index.row_token_R[row]; }
};

Experts make_experts(BenchTensors& t, const BenchSpec& spec) {
  const BenchShape shape = bench_shape(spec.shape, spec.scale);
  Experts c{.shape = shape, .index = bench_rows(shape, bench_route(shape, spec.routing).topk_TK)};
  const int64_t T = shape.T(), D = shape.D, F = shape.F, E = shape.E, R = shape.R();
  const DType dtype = DType::bf16;
  const float std_D = 1.0f / std::sqrt(static_cast<float>(D)), std_F = 1.0f / std::sqrt(static_cast<float>(F));
  c.x_TD = t.normal({T, D}, dtype, 1.0f);
  c.dout_TD = t.normal({T, D}, dtype, 1.0f);
  c.w1_e2FD = t.normal({E, 2 * F, D}, dtype, std_D);
  c.w2_eDF = t.normal({E, D, F}, dtype, std_F);
  if (shape.expert_biases) {
    c.b1_e2F = t.normal({E, 2 * F}, dtype, 1.0f);
    c.b2_eD = t.normal({E, D}, dtype, 1.0f);
  }
  c.weight_R = t.normal({R}, DType::f32, 1.0f);
  c.h_R2F = t.zeros({R, 2 * F}, dtype);
  c.a_RF = t.zeros({R, F}, dtype);
  c.y_RD = t.zeros({R, D}, dtype);
  c.dh_R2F = t.zeros({R, 2 * F}, dtype);
  c.sa_RF = t.zeros({R, F}, dtype);
  c.dx_RD = t.zeros({R, D}, dtype);
  c.dweight_R = t.zeros({R}, DType::f32);
  c.dw1_e2FD = t.zeros(c.w1_e2FD.shape, DType::f32);
  c.dw2_eDF = t.zeros(c.w2_eDF.shape, DType::f32);
  c.rows = {.offsets_e1 = t.ints({E + 1}, c.index.offsets_E1), .token_R = t.ints({R}, c.index.row_token_R)};
  return c;
}

double bias_at(Stream& s, const Tensor& b_eN, int64_t expert, int64_t n) {
  return b_eN.empty() ? 0 : HostRows(s, b_eN, expert, 1).at(expert, n);
}

double up_element(Stream& s, const Experts& c, int64_t r, int64_t j) {
  const int64_t w = c.expert_of(r) * 2 * c.shape.F + j, t = c.token_of(r);
  return dot(HostRows(s, c.w1_e2FD, w, 1), w, HostRows(s, c.x_TD, t, 1), t) + bias_at(s, c.b1_e2F, c.expert_of(r), j);
}

double down_element(Stream& s, const Experts& c, int64_t r, int64_t i) {
  const int64_t w = c.expert_of(r) * c.shape.D + i;
  return dot(HostRows(s, c.w2_eDF, w, 1), w, HostRows(s, c.a_RF, r, 1), r) + bias_at(s, c.b2_eD, c.expert_of(r), i);
}

// Computes a from the rounded h.
double a_element(Stream& s, const Experts& c, int64_t r, int64_t f) {
  const HostRows h(s, c.h_R2F, r, 1);
  return GatedAt(c.shape.activation, h.at(r, f), h.at(r, c.shape.F + f)).a;
}

// Returns w2^T dout of row r.
std::vector<double> da_of_row(Stream& s, const Experts& c, int64_t r) {
  const int64_t D = c.shape.D, first = c.expert_of(r) * D, t = c.token_of(r);
  const HostRows w2_DF(s, c.w2_eDF, first, D), dout(s, c.dout_TD, t, 1);
  std::vector<double> da_F(c.shape.F);
  for (int64_t i = 0; i < D; ++i) w2_DF.add_to(da_F, dout.at(t, i), first + i);
  return da_F;
}

// How results are checked: `samples` rows, and as many columns of each where a result is an element.
struct ResultCheck {
  double tolerance = kBf16Tolerance;  // of the relative error
  int64_t samples = 4;
};

// The check of products whose operands were quantised, against the numbers before. The bound is twice the error that
// they have; 64 errors in a sample do not exceed it by chance.
ResultCheck check_of_quantised(DType left) { return {.tolerance = 2 * quantised_error(left), .samples = 8}; }

// Checks all outputs of d_expert_down in a few rows, from the rounded h.
void check_d_down(Stream& s, BenchLine& line, const Experts& c, const ResultCheck& check) {
  const int64_t F = c.shape.F;
  BenchSample dh, sa, dweight;
  for (const int64_t r : sampled(c.shape.R(), check.samples)) {
    const std::vector<double> da_F = da_of_row(s, c, r);
    const HostRows h(s, c.h_R2F, r, 1), got_dh(s, c.dh_R2F, r, 1), got_sa(s, c.sa_RF, r, 1);
    const double weight = HostRows(s, c.weight_R.view({c.shape.R(), 1}), r, 1).at(r, 0);
    double sum = c.b2_eD.empty() ? 0
                                 : dot(HostRows(s, c.b2_eD, c.expert_of(r), 1), c.expert_of(r),
                                       HostRows(s, c.dout_TD, c.token_of(r), 1), c.token_of(r));
    double squares = 0;
    for (int64_t f = 0; f < F; ++f) {
      const GatedAt at(c.shape.activation, h.at(r, f), h.at(r, F + f));
      dh.add(got_dh.at(r, f), weight * da_F[f] * at.by_gate);
      dh.add(got_dh.at(r, F + f), weight * da_F[f] * at.by_up);
      sa.add(got_sa.at(r, f), weight * at.a);
      sum += da_F[f] * at.a;
      squares += da_F[f] * at.a * da_F[f] * at.a;
    }
    dweight.add(HostRows(s, c.dweight_R.view({c.shape.R(), 1}), r, 1).at(r, 0), sum, std::sqrt(squares));
  }
  check_sample(line, "dh", dh, check.tolerance);
  check_sample(line, "sa", sa, check.tolerance);
  check_sample(line, "dweight", dweight, check.tolerance);
}

// Returns w1^T dh of row r.
std::vector<double> dx_of_row(Stream& s, const Experts& c, int64_t r) {
  const int64_t F2 = 2 * c.shape.F, first = c.expert_of(r) * F2;
  const HostRows w1_2FD(s, c.w1_e2FD, first, F2), dh(s, c.dh_R2F, r, 1);
  std::vector<double> dx_D(c.shape.D);
  for (int64_t j = 0; j < F2; ++j) w1_2FD.add_to(dx_D, dh.at(r, j), first + j);
  return dx_D;
}

// Quantises operands as a recipe does, into memory of the bench. With recipe none they are the tensors themselves.
class BenchOperands {
 public:
  BenchOperands(BenchTensors& tensors, Stream& s, PrecisionRecipe recipe, const Rows& rows)
      : tensors_(tensors), s_(s), recipe_(recipe), rows_(rows) {}
  bool are_plain() const { return recipe_ == PrecisionRecipe::none; }

  Operand rows(const Tensor& x) const { return copy(x, x.shape, ScaleLayout::row_blocks, DType::f8_e4m3, false); }
  Operand gradients(const Tensor& x) const { return copy(x, x.shape, ScaleLayout::row_blocks, of_gradients(), false); }
  Operand weights(const Tensor& w) const { return copy(w, w.shape, ScaleLayout::square_blocks, DType::f8_e4m3, false); }
  Operand weights_for_dx(const Tensor& w) const {
    return copy(w, {w.dim(0), w.dim(2), w.dim(1)}, ScaleLayout::square_blocks, DType::f8_e4m3, true);
  }
  // The sides of a weight gradient.
  Operand left(const Tensor& x, bool gathered) const {
    return columns(x, gathered, ScaleLayout::row_blocks, of_gradients());
  }
  Operand right(const Tensor& x, bool gathered) const {
    return columns(x, gathered, ScaleLayout::square_blocks, DType::f8_e4m3);
  }

 private:
  DType of_gradients() const { return gradient_element(recipe_); }
  Operand copy(const Tensor& x, Shape shape, ScaleLayout layout, DType element, bool transposed, Rows by = {}) const {
    if (are_plain()) return x;
    if (recipe_ == PrecisionRecipe::fp8_tensor) layout = ScaleLayout::per_tensor;
    Operand q(tensors_.zeros(shape, element), tensors_.zeros(scale_shape(layout, shape), DType::f32), layout);
    q.transposed = transposed;
    quantize(s_, {.q = q, .x_RC = x, .offsets_e1 = by.offsets_e1, .token_R = by.token_R});
    return q;
  }
  Operand columns(const Tensor& x, bool gathered, ScaleLayout layout, DType element) const {
    const int64_t padded = padded_rows(rows_.token_R.numel(), rows_.offsets_e1.numel() - 1);
    return copy(x, {x.dim(1), padded}, layout, element, true, {rows_.offsets_e1, gathered ? rows_.token_R : Tensor{}});
  }

  BenchTensors& tensors_;
  Stream& s_;
  PrecisionRecipe recipe_;
  Rows rows_;
};

template <class Op>
int64_t time_op(BenchDevice& device, BenchTensors& tensors, BenchLine& line, Op op, void (*run)(Stream&, const Op&)) {
  op.scratch = tensors.bytes(Op::scratch_bytes(op, device.stream()));
  line.cost = cost(op);
  return device.time(line, [&] { run(device.stream(), op); });
}

// Compares a few elements of the output with plain loops.
void check_elements(Stream& s, BenchLine& line, const char* result, const Tensor& out_RN,
                    const std::function<double(int64_t, int64_t)>& expected, const ResultCheck& check = {}) {
  BenchSample sample;
  for (const int64_t r : sampled(out_RN.dim(0), check.samples)) {
    const HostRows row(s, out_RN, r, 1);
    for (const int64_t n : sampled(out_RN.dim(1), check.samples)) sample.add(row.at(r, n), expected(r, n));
  }
  check_sample(line, result, sample, check.tolerance);
}

// Returns the expert with the fewest rows.
int64_t smallest_expert(const Experts& c) {
  int64_t best = -1, fewest = c.shape.R() + 1;
  for (int64_t e = 0; e < c.shape.E; ++e) {
    const int64_t rows = c.index.offsets_E1[e + 1] - c.index.offsets_E1[e];
    if (rows == 0 || rows >= fewest) continue;
    best = e;
    fewest = rows;
  }
  return best;
}

HostRows wgrad_side(Stream& s, const Experts& c, const Tensor& side, bool gather, int64_t begin, int64_t end) {
  return gather ? HostRows(s, side, 0, c.shape.T()) : HostRows(s, side, begin, end - begin);
}

// Checks a few elements of one expert. Weight gradients accumulate over all calls.
void check_wgrad(Stream& s, BenchLine& line, const Experts& c, const ExpertWgrad& a, int64_t calls,
                 const ResultCheck& check) {
  const int64_t e = smallest_expert(c), M = a.dw_eMN.dim(1);
  const int64_t begin = c.index.offsets_E1[e], end = c.index.offsets_E1[e + 1];
  const HostRows left = wgrad_side(s, c, a.left_RM.data, a.gather_left, begin, end);
  const HostRows right = wgrad_side(s, c, a.right_RN.data, a.gather_right, begin, end);
  BenchSample sample;
  for (const int64_t m : sampled(M, check.samples)) {
    const HostRows row(s, a.dw_eMN, e * M + m, 1);
    for (const int64_t n : sampled(row.columns(), check.samples)) {
      double sum = 0;
      for (int64_t r = begin; r < end; ++r)
        sum += left.at(a.gather_left ? c.token_of(r) : r, m) * right.at(a.gather_right ? c.token_of(r) : r, n);
      sample.add(row.at(e * M + m, n), sum * static_cast<double>(calls));
    }
  }
  check_sample(line, "dw", sample, check.tolerance);
}

// Returns the grouped product of an op, and the config that a GPU's kernel has for it. Empty on the CPU.
template <class Op>
std::string text_of_kernel(const Stream& s, const Op& op) {
  if (s.device() != DeviceKind::cuda) return "";
  return fmt::format("{}; {}", to_string(describe(op)), cuda::kernel_text(s, op));
}

// The ops of the bench, in the order of a layer. Each line is checked after its op has run.
class ExpertOps {
 public:
  explicit ExpertOps(const BenchSpec& spec)
      : device_(spec),
        tensors_(device_.stream()),
        c_(make_experts(tensors_, spec)),
        operands_(tensors_, device_.stream(), spec.operands, c_.rows) {
    own_.offsets_e1 = c_.rows.offsets_e1;
  }

  BenchLine up() {
    BenchLine line{.name = "expert_up"};
    const ExpertUp op{.h_R2F = c_.h_R2F,
                      .a_RF = c_.a_RF,
                      .x_TD = operands_.rows(c_.x_TD),
                      .w1_e2FD = operands_.weights(c_.w1_e2FD),
                      .b1_e2F = c_.b1_e2F,
                      .rows = c_.rows,
                      .activation = c_.shape.activation};
    time_op(device_, tensors_, line, op, expert_up);
    line.kernel = text_of_kernel(s(), op);
    check_elements(
        s(), line, "h", c_.h_R2F, [&](int64_t r, int64_t j) { return up_element(s(), c_, r, j); }, check_of(op.x_TD));
    check_elements(s(), line, "a", c_.a_RF, [&](int64_t r, int64_t f) { return a_element(s(), c_, r, f); });
    return line;
  }
  BenchLine down() {
    BenchLine line{.name = "expert_down"};
    const ExpertDown op{.y_RD = c_.y_RD,
                        .a_RF = operands_.rows(c_.a_RF),
                        .w2_eDF = operands_.weights(c_.w2_eDF),
                        .b2_eC = c_.b2_eD,
                        .rows = own_};
    time_op(device_, tensors_, line, op, expert_down);
    line.kernel = text_of_kernel(s(), op);
    check_elements(
        s(), line, "y", c_.y_RD, [&](int64_t r, int64_t i) { return down_element(s(), c_, r, i); }, check_of(op.a_RF));
    return line;
  }
  BenchLine d_down() {
    BenchLine line{.name = "d_expert_down"};
    const DExpertDown op{.dh_R2F = c_.dh_R2F,
                         .sa_RF = c_.sa_RF,
                         .dweight_R = c_.dweight_R,
                         .dout_TD = operands_.gradients(c_.dout_TD),
                         .w2_eDF = operands_.weights_for_dx(c_.w2_eDF),
                         .b2_eC = c_.b2_eD,
                         .h_R2F = c_.h_R2F,
                         .weight_R = c_.weight_R,
                         .rows = c_.rows,
                         .activation = c_.shape.activation};
    time_op(device_, tensors_, line, op, d_expert_down);
    line.kernel = text_of_kernel(s(), op);
    check_d_down(s(), line, c_, check_of(op.dout_TD));
    return line;
  }
  BenchLine d_up() {
    BenchLine line{.name = "d_expert_up"};
    const DExpertUp op{.dx_RD = c_.dx_RD,
                       .dh_R2F = operands_.gradients(c_.dh_R2F),
                       .w1_e2FD = operands_.weights_for_dx(c_.w1_e2FD),
                       .rows = own_};
    time_op(device_, tensors_, line, op, d_expert_up);
    line.kernel = text_of_kernel(s(), op);
    check_elements(
        s(), line, "dx", c_.dx_RD,
        [&, row = int64_t{-1}, dx_D = std::vector<double>()](int64_t r, int64_t i) mutable {
          if (std::exchange(row, r) != r) dx_D = dx_of_row(s(), c_, r);
          return dx_D[static_cast<size_t>(i)];
        },
        check_of(op.dh_R2F));
    return line;
  }
  BenchLine wgrad_w2() { return wgrad("expert_wgrad_w2", wgrad_w2_op(true)); }
  BenchLine wgrad_w1() { return wgrad("expert_wgrad_w1", wgrad_w1_op(true)); }
  BenchLine wgrad_w2_stored() { return wgrad("expert_wgrad_w2_stored", wgrad_w2_op(false)); }
  BenchLine wgrad_w1_stored() { return wgrad("expert_wgrad_w1_stored", wgrad_w1_op(false)); }
  Ceilings ceilings(double scale) { return device_.measure_ceilings(scale); }

 private:
  Stream& s() { return device_.stream(); }
  // left: the operand of the product that is a result, or that it is computed from.
  ResultCheck check_of(const Operand& left, double of_plain = kBf16Tolerance) const {
    return operands_.are_plain() ? ResultCheck{of_plain} : check_of_quantised(left.data.dtype);
  }
  ExpertWgrad wgrad_w2_op(bool accumulate) const {
    return {.dw_eMN = c_.dw2_eDF,
            .left_RM = c_.dout_TD,
            .right_RN = c_.sa_RF,
            .gather_left = true,
            .accumulate = accumulate,
            .rows = c_.rows};
  }
  ExpertWgrad wgrad_w1_op(bool accumulate) const {
    return {.dw_eMN = c_.dw1_e2FD,
            .left_RM = c_.dh_R2F,
            .right_RN = c_.x_TD,
            .gather_right = true,
            .accumulate = accumulate,
            .rows = c_.rows};
  }
  BenchLine wgrad(const char* name, const ExpertWgrad& op) {
    BenchLine line{.name = name};
    ExpertWgrad timed = op;
    if (!operands_.are_plain()) {
      timed.left_RM = operands_.left(op.left_RM.data, op.gather_left);
      timed.right_RN = operands_.right(op.right_RN.data, op.gather_right);
      timed.rows = own_;
    }
    const int64_t calls = time_op(device_, tensors_, line, timed, expert_wgrad);
    line.cost.flops = cost(op).flops;  // without padding
    line.kernel = text_of_kernel(s(), timed);
    check_wgrad(s(), line, c_, op, op.accumulate ? calls : 1, check_of(timed.left_RM, kF32SumTolerance));
    return line;
  }

  BenchDevice device_;
  BenchTensors tensors_;
  Experts c_;
  BenchOperands operands_;
  Rows own_;  // row r reads row r
};

}  // namespace

BenchReport bench_experts(const BenchSpec& spec) {
  ExpertOps ops(spec);
  BenchReport report{.ceilings = ops.ceilings(spec.scale)};
  std::vector<BenchLine (ExpertOps::*)()> all{&ExpertOps::up,   &ExpertOps::down,     &ExpertOps::d_down,
                                              &ExpertOps::d_up, &ExpertOps::wgrad_w2, &ExpertOps::wgrad_w1};
  if (spec.operands != PrecisionRecipe::none)
    all.insert(all.end(), {&ExpertOps::wgrad_w2_stored, &ExpertOps::wgrad_w1_stored});
  for (const auto op : all) {
    BenchLine line = (ops.*op)();
    line.roofline_ms = roofline_ms({line.cost}, report.ceilings);
    report.lines.push_back(line);
  }
  return report;
}

}  // namespace moebius

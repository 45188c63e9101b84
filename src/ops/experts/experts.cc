#include "ops/experts/experts.h"

#include "ops/experts/experts_backends.h"
#include "ops/experts/few_rows.h"
#include "ops/experts/few_rows_backends.h"
#include "ops/grouped_gemm/block_scaled.h"
#include "ops/op_checks.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }
double count_of(const Tensor& t) { return static_cast<double>(t.numel()); }

// Checks weights [e, n, m], and returns e.
int64_t check_weights(const char* who, const char* name, const Tensor& w, DType dtype, int64_t n, int64_t m) {
  MOEBIUS_CHECK(usage, w.shape.rank() == 3, "{}: {} must have the dims of experts, rows and columns; got {}", who, name,
                to_string(w));
  check_tensor(who, name, w, dtype, {w.dim(0), n, m});
  return w.dim(0);
}

// Checks a bias of the columns [first, first + C) of `width`; an empty one passes.
void check_bias(const char* who, const char* name, const Tensor& b, DType dtype, int64_t num_experts, int64_t first,
                int64_t width) {
  if (b.empty()) return;
  MOEBIUS_CHECK(usage, b.shape.rank() == 2 && first >= 0 && first + b.dim(1) <= width,
                "{}: {} must have a row for each expert, of columns from {} on of {}; got {}", who, name, first, width,
                to_string(b));
  check_tensor(who, name, b, dtype, {num_experts, b.dim(1)});
}

void check_rows(const char* who, const Rows& rows, int64_t num_experts, int64_t num_rows, bool may_gather) {
  check_tensor(who, "offsets", rows.offsets_e1, DType::i32, {num_experts + 1});
  if (may_gather && !rows.token_R.empty()) check_tensor(who, "token", rows.token_R, DType::i32, {num_rows});
}

// Checks the part of the rows of e experts that an op computes.
void check_part(const char* who, const RowPart& part, int64_t e, const Operand& x, bool few_rows = false) {
  if (part.runs_2G.empty()) return;
  const int64_t G = part.runs_2G.numel() / 2;
  MOEBIUS_CHECK(
      usage, x.is_plain() && !few_rows && e > 0 && G % e == 0,
      "{}: a part of the rows needs plain operands without few_rows, and as many runs of each of the {} experts; "
      "got x {} and runs {}",
      who, e, to_string(x), to_string(part.runs_2G));
  check_tensor(who, "runs", part.runs_2G, DType::i32, {2, G});
}

// The rows and weights of a product that sums over their columns; both are plain, or both quantised.
struct Operands {
  const char* x_name;
  const Operand& x;
  const char* w_name;
  const Operand& w;
  int64_t n, m;  // of a plain w [e, n, m]
  bool w_transposed;
};

// Checks the operands, and returns the number of experts. dtype: of the plain tensors.
int64_t check_operands(const char* who, const Operands& o, DType dtype) {
  MOEBIUS_CHECK(usage, o.x.data.shape.rank() == 2, "{}: {} must be a matrix; got {}", who, o.x_name, to_string(o.x));
  if (!check_both_quantised(who, o.x_name, o.x, o.w_name, o.w)) {
    check_matrix(who, o.x_name, o.x.data);
    check_tensor(who, o.x_name, o.x.data, dtype, o.x.data.shape);
    return check_weights(who, o.w_name, o.w.data, dtype, o.n, o.m);
  }
  check_quantised(who, o.x_name, o.x, o.x.data.shape, /*transposed=*/false);
  check_quantised(who, o.w_name, o.w, {o.w.data.dim(0), o.n, o.m}, o.w_transposed);
  return o.w.data.dim(0);
}

// The sm_90 kernels for quantised operands support only SwiGLU without biases.
void check_gpu_activation(const char* who, const GatedActivation& activation, const Tensor& bias) {
  MOEBIUS_CHECK(usage, activation == GatedActivation{} && bias.empty(),
                "{} on a GPU: quantised operands need SwiGLU without biases; set precision.recipe to \"none\", or add "
                "the experts' names to precision.keep",
                who);
}

// Checks what a GPU requires of quantised operands.
void check_for_gpu(const ExpertUp& a) {
  constexpr const char* who = "expert_up";
  check_block_scaled(who, {"x", a.x_TD, "w1", a.w1_e2FD, TensorElements::e4m3});
  check_block_scaled_result(who, "a", a.a_RF, gated_columns(a.x_TD.layout));
  check_gpu_activation(who, a.activation, a.b1_e2F);
}
void check_for_gpu(const ExpertDown& a) {
  constexpr const char* who = "expert_down";
  check_block_scaled(who, {"a", a.a_RF, "w2", a.w2_eDF, TensorElements::both});
  check_block_scaled_result(who, "y", a.y_RD);
  check_gpu_activation(who, {}, a.b2_eC);
}
void check_for_gpu(const DExpertDown& a) {
  constexpr const char* who = "d_expert_down";
  check_block_scaled(who, {"dout", a.dout_TD, "w2", a.w2_eDF, TensorElements::e5m2});
  check_block_scaled_result(who, "sa", a.sa_RF);
  check_gpu_activation(who, a.activation, a.b2_eC);
}
void check_for_gpu(const DExpertUp& a) {
  constexpr const char* who = "d_expert_up";
  check_block_scaled(who, {"dh", a.dh_R2F, "w1", a.w1_e2FD, TensorElements::both});
  check_block_scaled_result(who, "dx", a.dx_RD);
}
void check_for_gpu(const ExpertWgrad& a) {
  constexpr const char* who = "expert_wgrad";
  check_block_scaled(who, {"left", a.left_RM, "right", a.right_RN, TensorElements::e5m2});
  MOEBIUS_CHECK(usage, a.dw_eMN.dim(2) % 4 == 0, "{} on a GPU: dw must have a multiple of 4 columns; got {}", who,
                to_string(a.dw_eMN));
}

template <class Op>
void check_for_gpu(const Op& a, const Operand& x, const Stream& s) {
  if (!x.is_plain() && s.target() == DeviceKind::cuda) check_for_gpu(a);
}

// Checks a term of the product of R rows with N columns.
template <class Op>
void check_term(const char* who, const Op& a, const Stream& s, const Tensor& product_RN, int64_t e, bool w_transposed) {
  if (a.added.empty()) return;
  const int64_t R = product_RN.dim(0), N = product_RN.dim(1);
  MOEBIUS_CHECK(usage, a.added.low_RL.shape.rank() == 2, "{}: low must be a matrix; got {}", who,
                to_string(a.added.low_RL));
  const int64_t L = a.added.low_RL.dim(1);
  check_tensor(who, "low", a.added.low_RL, product_RN.dtype, {R, L});
  check_tensor(who, "w of the low-rank term", a.added.w, product_RN.dtype,
               w_transposed ? Shape{e, L, N} : Shape{e, N, L});
  MOEBIUS_CHECK(usage, s.device() == DeviceKind::null || adds_term(s, a),
                "{}: the kernel for {} does not add a low-rank term; compute it separately (ops/low_rank/low_rank.h)",
                who, to_string(product_RN));
}

// A product of all rows: its operations, and its bytes by the tensors that they are of.
struct ProductWork {
  double flops = 0;
  double row_bytes = 0;     // of tensors with a row for each row of the product
  double source_bytes = 0;  // of a tensor whose rows are gathered
  double weight_bytes = 0;
};

// Returns `work` with the bytes of x, which it gathers if rows have tokens.
ProductWork reading(const Operand& x, const Rows& rows, ProductWork work) {
  (rows.token_R.empty() ? work.row_bytes : work.source_bytes) += bytes_of(x.data);
  return work;
}

// The cost of a product, and of its term where it has one. A part of the rows reads the weights whole, and of all else
// its share.
Cost cost_of(const ProductWork& w, const LowRankTerm& term, const Tensor& product_RN, const RowPart& part) {
  Cost cost{.flops = w.flops * part.share,
            .bytes = w.row_bytes * part.share + w.source_bytes * part.source_share + w.weight_bytes,
            .weight_bytes = w.weight_bytes};
  if (!term.empty()) {
    cost += {.flops = 2 * count_of(term.low_RL) * product_RN.dim(1),
             .bytes = bytes_of(term.low_RL) + bytes_of(term.w),
             .weight_bytes = bytes_of(term.w)};
  }
  return cost;
}

void check(const ExpertUp& a, const Stream& s) {
  constexpr const char* who = "expert_up";
  check_matrix(who, "a", a.a_RF);
  const DType dtype = a.a_RF.dtype;
  const int64_t R = a.a_RF.dim(0), F = a.a_RF.dim(1);
  const int64_t e = check_operands(who, {"x", a.x_TD, "w1", a.w1_e2FD, 2 * F, a.x_TD.data.dim(1), false}, dtype);
  check_tensor(who, "a", a.a_RF, dtype, {R, F});
  check_tensor(who, "h", a.h_R2F, dtype, {R, 2 * F});
  if (!a.b1_e2F.empty()) check_tensor(who, "b1", a.b1_e2F, dtype, {e, 2 * F});
  check_term(who, a, s, a.h_R2F, e, /*w_transposed=*/false);
  check_rows(who, a.rows, e, R, /*may_gather=*/true);
  check_part(who, a.part, e, a.x_TD, a.few_rows);
  check_for_gpu(a, a.x_TD, s);
  check_scratch(who, a.scratch, ExpertUp::scratch_bytes(a, s));
}

void check(const ExpertDown& a, const Stream& s) {
  constexpr const char* who = "expert_down";
  check_matrix(who, "y", a.y_RD);
  const DType dtype = a.y_RD.dtype;
  const int64_t R = a.a_RF.data.dim(0), D = a.y_RD.dim(1);
  const int64_t e = check_operands(who, {"a", a.a_RF, "w2", a.w2_eDF, D, a.a_RF.data.dim(1), false}, dtype);
  check_tensor(who, "y", a.y_RD, dtype, {R, D});
  check_bias(who, "b2", a.b2_eC, dtype, e, a.b2_first, D);
  check_term(who, a, s, a.y_RD, e, /*w_transposed=*/false);
  check_rows(who, a.rows, e, R, /*may_gather=*/false);
  check_part(who, a.part, e, a.a_RF, a.few_rows);
  check_for_gpu(a, a.a_RF, s);
  check_scratch(who, a.scratch, ExpertDown::scratch_bytes(a, s));
}

void check(const DExpertDown& a, const Stream& s) {
  constexpr const char* who = "d_expert_down";
  check_matrix(who, "sa", a.sa_RF);
  const DType dtype = a.sa_RF.dtype;
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.data.dim(1);
  const int64_t e = check_operands(who, {"dout", a.dout_TD, "w2", a.w2_eDF, D, F, true}, dtype);
  check_tensor(who, "sa", a.sa_RF, dtype, {R, F});
  check_tensor(who, "h", a.h_R2F, dtype, {R, 2 * F});
  check_tensor(who, "dh", a.dh_R2F, dtype, {R, 2 * F});
  check_tensor(who, "weight", a.weight_R, DType::f32, {R});
  check_tensor(who, "dweight", a.dweight_R, DType::f32, {R});
  check_bias(who, "b2", a.b2_eC, dtype, e, a.b2_first, D);
  check_term(who, a, s, a.sa_RF, e, /*w_transposed=*/true);
  check_rows(who, a.rows, e, R, /*may_gather=*/true);
  check_part(who, a.part, e, a.dout_TD);
  check_for_gpu(a, a.dout_TD, s);
  check_scratch(who, a.scratch, DExpertDown::scratch_bytes(a, s));
}

void check(const DExpertUp& a, const Stream& s) {
  constexpr const char* who = "d_expert_up";
  check_matrix(who, "dx", a.dx_RD);
  const DType dtype = a.dx_RD.dtype;
  const int64_t R = a.dh_R2F.data.dim(0), D = a.dx_RD.dim(1);
  const int64_t e = check_operands(who, {"dh", a.dh_R2F, "w1", a.w1_e2FD, a.dh_R2F.data.dim(1), D, true}, dtype);
  check_tensor(who, "dx", a.dx_RD, dtype, {R, D});
  check_term(who, a, s, a.dx_RD, e, /*w_transposed=*/true);
  check_rows(who, a.rows, e, R, /*may_gather=*/false);
  check_part(who, a.part, e, a.dh_R2F);
  check_for_gpu(a, a.dh_R2F, s);
  check_scratch(who, a.scratch, DExpertUp::scratch_bytes(a, s));
}

// Checks transposes of the rows of all experts, each of which begins at a multiple of kGroupAlign columns.
void check_quantised_wgrad(const ExpertWgrad& a) {
  constexpr const char* who = "expert_wgrad";
  const int64_t e = check_weights(who, "dw", a.dw_eMN, DType::f32, a.dw_eMN.dim(1), a.dw_eMN.dim(2));
  const int64_t padded = a.left_RM.data.dim(1);
  MOEBIUS_CHECK(usage, a.left_RM.data.shape.rank() == 2 && padded % kGroupAlign == 0 && padded >= e * kGroupAlign,
                "{}: quantised left must have padded_rows(R, {}) columns, a multiple of {}; got {}", who, e,
                kGroupAlign, to_string(a.left_RM));
  check_quantised(who, "left", a.left_RM, {padded, a.dw_eMN.dim(1)}, /*transposed=*/true);
  check_quantised(who, "right", a.right_RN, {padded, a.dw_eMN.dim(2)}, /*transposed=*/true);
  check_rows(who, a.rows, e, 0, /*may_gather=*/false);
}

void check(const ExpertWgrad& a, const Stream& s) {
  constexpr const char* who = "expert_wgrad";
  if (check_both_quantised(who, "left", a.left_RM, "right", a.right_RN)) {
    check_quantised_wgrad(a);
    check_for_gpu(a, a.left_RM, s);
    return check_scratch(who, a.scratch, ExpertWgrad::scratch_bytes(a, s));
  }
  check_matrix(who, "left", a.left_RM.data);
  check_matrix(who, "right", a.right_RN.data);
  const DType dtype = a.left_RM.data.dtype;
  check_tensor(who, "left", a.left_RM.data, dtype, a.left_RM.data.shape);
  check_tensor(who, "right", a.right_RN.data, dtype, a.right_RN.data.shape);
  const bool rounds = a.dw_eMN.dtype == DType::bf16 && dtype == DType::bf16;
  const int64_t e = check_weights(who, "dw", a.dw_eMN, rounds ? DType::bf16 : DType::f32, a.left_RM.data.dim(1),
                                  a.right_RN.data.dim(1));
  const bool gathers = a.gather_left || a.gather_right;
  MOEBIUS_CHECK(usage,
                !gathers || !a.rows.token_R.empty() || (a.gather_left ? a.right_RN.data : a.left_RM.data).empty(),
                "{}: a side is gathered, but rows have no token index; got {}", who, to_string(a.rows.token_R));
  check_rows(who, a.rows, e, a.rows.token_R.numel(), gathers);
  check_scratch(who, a.scratch, ExpertWgrad::scratch_bytes(a, s));
}

void check(const ExpertBiasGrad& a) {
  constexpr const char* who = "expert_bias_grad";
  check_matrix(who, "x", a.x_RM);
  check_tensor(who, "x", a.x_RM, a.x_RM.dtype, a.x_RM.shape);
  MOEBIUS_CHECK(usage, a.db_eN.shape.rank() == 2 && a.x_first >= 0 && a.x_first + a.db_eN.dim(1) <= a.x_RM.dim(1),
                "{}: db must have a row for each expert, of columns from {} on of x {}; got {}", who, a.x_first,
                to_string(a.x_RM), to_string(a.db_eN));
  const int64_t e = a.db_eN.dim(0), R = a.gather ? a.rows.token_R.numel() : a.x_RM.dim(0);
  check_tensor(who, "db", a.db_eN, DType::f32, {e, a.db_eN.dim(1)});
  if (!a.weight_R.empty()) check_tensor(who, "weight", a.weight_R, DType::f32, {R});
  check_rows(who, a.rows, e, R, a.gather);
}

}  // namespace

void expert_up(Stream& s, const ExpertUp& a) {
  check(a, s);
  OpScope scope(s, "expert_up", cost(a));
  if (!a.a_RF.empty()) run_on_device(s, cpu::expert_up, cuda::expert_up, a);
}

Cost cost(const ExpertUp& a) {
  const ProductWork work{.flops = 2 * count_of(a.h_R2F) * a.x_TD.data.dim(1),
                         .row_bytes = bytes_of(a.h_R2F) + bytes_of(a.a_RF),
                         .weight_bytes = bytes_of(a.w1_e2FD.data)};
  return cost_of(reading(a.x_TD, a.rows, work), a.added, a.h_R2F, a.part);
}

void expert_down(Stream& s, const ExpertDown& a) {
  check(a, s);
  OpScope scope(s, "expert_down", cost(a));
  if (!a.y_RD.empty()) run_on_device(s, cpu::expert_down, cuda::expert_down, a);
}

void expert_down_after_up(Stream& s, const ExpertDown& a) {
  check(a, s);
  OpScope scope(s, "expert_down", cost(a));
  if (!a.y_RD.empty()) run_on_device(s, cpu::expert_down, cuda::expert_down_after_up, a);
}

Cost cost(const ExpertDown& a) {
  return cost_of({.flops = 2 * count_of(a.a_RF.data) * a.y_RD.dim(1),
                  .row_bytes = bytes_of(a.a_RF.data) + bytes_of(a.y_RD),
                  .weight_bytes = bytes_of(a.w2_eDF.data)},
                 a.added, a.y_RD, a.part);
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  check(a, s);
  OpScope scope(s, "d_expert_down", cost(a));
  if (!a.sa_RF.empty()) run_on_device(s, cpu::d_expert_down, cuda::d_expert_down, a);
}

Cost cost(const DExpertDown& a) {
  const ProductWork work{.flops = 2 * count_of(a.sa_RF) * a.dout_TD.data.dim(1),
                         .row_bytes = 2 * bytes_of(a.h_R2F) + bytes_of(a.sa_RF) + 2 * bytes_of(a.weight_R),
                         .weight_bytes = bytes_of(a.w2_eDF.data)};
  return cost_of(reading(a.dout_TD, a.rows, work), a.added, a.sa_RF, a.part);
}

void d_expert_up(Stream& s, const DExpertUp& a) {
  check(a, s);
  OpScope scope(s, "d_expert_up", cost(a));
  if (!a.dx_RD.empty()) run_on_device(s, cpu::d_expert_up, cuda::d_expert_up, a);
}

Cost cost(const DExpertUp& a) {
  return cost_of({.flops = 2 * count_of(a.dh_R2F.data) * a.dx_RD.dim(1),
                  .row_bytes = bytes_of(a.dh_R2F.data) + bytes_of(a.dx_RD),
                  .weight_bytes = bytes_of(a.w1_e2FD.data)},
                 a.added, a.dx_RD, a.part);
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  check(a, s);
  OpScope scope(s, "expert_wgrad", cost(a));
  if (!a.dw_eMN.empty()) run_on_device(s, cpu::expert_wgrad, cuda::expert_wgrad, a);
}

Cost cost(const ExpertWgrad& a) {
  const int64_t R = a.gather_left ? a.right_RN.shape()[0] : a.left_RM.shape()[0];
  const double gradient = (a.accumulate ? 2 : 1) * bytes_of(a.dw_eMN);
  return {.flops = 2.0 * static_cast<double>(R) * a.dw_eMN.dim(1) * a.dw_eMN.dim(2),
          .bytes = bytes_of(a.left_RM.data) + bytes_of(a.right_RN.data) + gradient,
          .weight_bytes = gradient};
}

void expert_bias_grad(Stream& s, const ExpertBiasGrad& a) {
  check(a);
  OpScope scope(s, "expert_bias_grad", cost(a));
  if (!a.db_eN.empty()) run_on_device(s, cpu::expert_bias_grad, cuda::expert_bias_grad, a);
}

Cost cost(const ExpertBiasGrad& a) {
  const double R = static_cast<double>(a.gather ? a.rows.token_R.numel() : a.x_RM.dim(0));
  return {2 * R * a.db_eN.dim(1), bytes_of(a.x_RM) + 2 * bytes_of(a.db_eN)};
}

namespace {

template <class Op>
bool adds_term_on(const Stream& s, const Op& a) {
  return s.device() == DeviceKind::cuda && cuda::adds_term(s, a);
}

}  // namespace

bool adds_term(const Stream& s, const ExpertUp& a) { return adds_term_on(s, a); }
bool adds_term(const Stream& s, const ExpertDown& a) { return adds_term_on(s, a); }
bool adds_term(const Stream& s, const DExpertDown& a) { return adds_term_on(s, a); }
bool adds_term(const Stream& s, const DExpertUp& a) { return adds_term_on(s, a); }

// The scratch that the device needs.
namespace {

template <class Op>
int64_t scratch_bytes_of(const Op& a, const Stream& s) {
  return s.target() == DeviceKind::cuda ? cuda::scratch_bytes(a) : cpu::scratch_bytes(a, s.pool().size());
}

}  // namespace

int64_t ExpertUp::scratch_bytes(const ExpertUp& a, const Stream& s) { return scratch_bytes_of(a, s); }
int64_t ExpertDown::scratch_bytes(const ExpertDown& a, const Stream& s) { return scratch_bytes_of(a, s); }
int64_t DExpertDown::scratch_bytes(const DExpertDown& a, const Stream& s) { return scratch_bytes_of(a, s); }
int64_t DExpertUp::scratch_bytes(const DExpertUp& a, const Stream& s) { return scratch_bytes_of(a, s); }
int64_t ExpertWgrad::scratch_bytes(const ExpertWgrad& a, const Stream& s) { return scratch_bytes_of(a, s); }

}  // namespace moebius

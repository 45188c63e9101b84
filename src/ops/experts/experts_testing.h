// The data that the tests of the expert ops share: cases, a problem of each, and a run of every
// op on it.
#pragma once

#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "ops/cpu/testing.h"
#include "ops/experts/experts.h"
#include "ops/experts/experts_ref.h"
#include "ops/experts/few_rows.h"

namespace moebius::testing {

struct ExpertCase {
  std::string name;
  int64_t T, D, F;
  std::vector<int64_t> counts;  // rows of each expert
  int64_t spare = 0;            // rows past the last one
  bool gather = true;
  DType dtype = DType::f32;
  bool gpt_oss = false;  // biases, b2 of some columns alone, and the clamped activation
};

inline void PrintTo(const ExpertCase& c, std::ostream* out) { *out << c.name; }

// The data of a case: one of each tensor, x and dout by token.
struct ExpertProblem {
  explicit ExpertProblem(const ExpertCase& c) : c(c) {
    R = std::accumulate(c.counts.begin(), c.counts.end(), c.spare);
    shape = {c.T, c.D, c.F, {0}, {}};
    for (const int64_t n : c.counts) shape.offsets.push_back(shape.offsets.back() + n);
    for (int64_t r = 0; r < R && c.gather; ++r) shape.token.push_back((r * 7 + 3) % c.T);
    offsets = Array::of_ints({E() + 1}, {shape.offsets.begin(), shape.offsets.end()});
    if (c.gather) token = Array::of_ints({R}, {shape.token.begin(), shape.token.end()});
    const double wide = 1 / std::sqrt(static_cast<double>(c.D)), deep = 1 / std::sqrt(static_cast<double>(c.F));
    x = Array::normal({c.gather ? c.T : R, c.D}, c.dtype, 1);
    w1 = Array::normal({E(), 2 * c.F, c.D}, c.dtype, 2, wide);
    w2 = Array::normal({E(), c.D, c.F}, c.dtype, 3, deep);
    dout = Array::normal({c.gather ? c.T : R, c.D}, c.dtype, 4);
    weight = Array::normal({R}, DType::f32, 5);
    h = Array::normal({R, 2 * c.F}, c.dtype, 6);
    a = Array::normal({R, c.F}, c.dtype, 7);
    if (!c.gpt_oss) return;
    // Limits that cut much off on both sides.
    activation = {.alpha = 1.702f, .limit = 0.75f, .shift = 1.0f};
    ref_activation = {activation.alpha, activation.limit, activation.shift};
    b1 = Array::normal({E(), 2 * c.F}, c.dtype, 10);
    b2_first = c.D / 3;
    b2 = Array::normal({E(), c.D / 2}, c.dtype, 11);
  }
  ref::ColumnBias ref_b2() const { return {b2.values(), b2_first, b2.values().empty() ? 0 : c.D / 2}; }
  int64_t E() const { return static_cast<int64_t>(c.counts.size()); }
  // Each product adds a term of rank L.
  void add_terms(int64_t L) {
    const double size = 1 / std::sqrt(static_cast<double>(L));
    low = Array::normal({R, L}, c.dtype, 14);
    low_up = Array::normal({E(), 2 * c.F, L}, c.dtype, 15, size);
    low_down = Array::normal({E(), c.D, L}, c.dtype, 16, size);
    low_down_bwd = Array::normal({E(), L, c.F}, c.dtype, 17, size);
    low_up_bwd = Array::normal({E(), L, c.D}, c.dtype, 18, size);
  }
  LowRankTerm term(Array& w) { return w.values().empty() ? LowRankTerm{} : LowRankTerm{low.tensor(), w.tensor()}; }
  Rows rows() { return {offsets.tensor(), token.tensor()}; }

  ExpertCase c;
  int64_t R;
  ref::ExpertShape shape;
  Array offsets, token, x, w1, w2, dout, weight, h, a, b1, b2;
  Array low, low_up, low_down, low_down_bwd, low_up_bwd;
  int64_t b2_first = 0;
  GatedActivation activation;
  ref::Activation ref_activation;
  bool few_rows = false;
  std::vector<RowPart> parts = {};  // of the ops that take one; empty: all rows at once
};

// Runs an op with scratch of its own, which is poisoned before; for each of these parts of the rows, one after another.
template <class Op>
void run_expert_op(Stream& s, void (*op)(Stream&, const Op&), Op a, const std::vector<RowPart>& parts = {}) {
  if constexpr (requires { a.part; }) {
    for (const RowPart& part : parts) {
      a.part = part;
      run_expert_op(s, op, a);
    }
    if (!parts.empty()) return;
  }
  SharedBytes scratch(Op::scratch_bytes(a, s) + 64);
  std::memset(scratch.data(), 0xff, scratch.num_bytes());
  void* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
  a.scratch = {.data = aligned, .shape = {scratch.num_bytes() - 64}, .dtype = DType::u8};
  op(s, a);
  scratch.settle();
}

struct ExpertOutputs {
  Array h, a, y, dh, sa, dweight, dx, dw1, dw2, db1, db2;
  Array dw1_stored, dw2_stored;  // without accumulate
  std::vector<Array> all() const { return {h, a, y, dh, sa, dweight, dx, dw1, dw2, db1, db2, dw1_stored, dw2_stored}; }
  // Returns those that have a row, or an element, for each row.
  std::vector<std::pair<const char*, const Array*>> of_rows() const {
    return {{"h", &h}, {"a", &a}, {"y", &y}, {"dh", &dh}, {"sa", &sa}, {"dweight", &dweight}, {"dx", &dx}};
  }
};

// Every op on the problem's own inputs, none on another's output.
inline ExpertOutputs run_all_expert_ops(Stream& s, ExpertProblem& p) {
  const DType t = p.c.dtype;
  const int64_t D = p.c.D, F = p.c.F, R = p.R;
  ExpertOutputs o{.h = Array::poisoned({R, 2 * F}, t),
                  .a = Array::poisoned({R, F}, t),
                  .y = Array::poisoned({R, D}, t),
                  .dh = Array::poisoned({R, 2 * F}, t),
                  .sa = Array::poisoned({R, F}, t),
                  .dweight = Array::poisoned({R}, DType::f32),
                  .dx = Array::poisoned({R, D}, t),
                  .dw1 = Array::normal({p.E(), 2 * F, D}, DType::f32, 8),
                  .dw2 = Array::normal({p.E(), D, F}, DType::f32, 9),
                  .db1 = Array::normal({p.E(), 2 * F}, DType::f32, 12),
                  .db2 = Array::normal({p.E(), D / 2}, DType::f32, 13),
                  .dw1_stored = Array::poisoned({p.E(), 2 * F, D}, DType::f32),
                  .dw2_stored = Array::poisoned({p.E(), D, F}, DType::f32)};
  run_expert_op<ExpertUp>(s, expert_up,
                          {.h_R2F = o.h.tensor(),
                           .a_RF = o.a.tensor(),
                           .x_TD = p.x.tensor(),
                           .w1_e2FD = p.w1.tensor(),
                           .b1_e2F = p.b1.tensor(),
                           .added = p.term(p.low_up),
                           .rows = p.rows(),
                           .activation = p.activation,
                           .few_rows = p.few_rows},
                          p.parts);
  run_expert_op<ExpertDown>(s, p.few_rows ? expert_down_after_up : expert_down,
                            {.y_RD = o.y.tensor(),
                             .a_RF = p.a.tensor(),
                             .w2_eDF = p.w2.tensor(),
                             .b2_eC = p.b2.tensor(),
                             .added = p.term(p.low_down),
                             .b2_first = p.b2_first,
                             .rows = p.rows(),
                             .few_rows = p.few_rows},
                            p.parts);
  run_expert_op<DExpertDown>(s, d_expert_down,
                             {.dh_R2F = o.dh.tensor(),
                              .sa_RF = o.sa.tensor(),
                              .dweight_R = o.dweight.tensor(),
                              .dout_TD = p.dout.tensor(),
                              .w2_eDF = p.w2.tensor(),
                              .b2_eC = p.b2.tensor(),
                              .h_R2F = p.h.tensor(),
                              .weight_R = p.weight.tensor(),
                              .added = p.term(p.low_down_bwd),
                              .b2_first = p.b2_first,
                              .rows = p.rows(),
                              .activation = p.activation},
                             p.parts);
  run_expert_op<DExpertUp>(s, d_expert_up,
                           {.dx_RD = o.dx.tensor(),
                            .dh_R2F = p.h.tensor(),
                            .w1_e2FD = p.w1.tensor(),
                            .added = p.term(p.low_up_bwd),
                            .rows = p.rows()},
                           p.parts);
  for (const bool accumulate : {true, false}) {
    run_expert_op<ExpertWgrad>(s, expert_wgrad,
                               {.dw_eMN = (accumulate ? o.dw1 : o.dw1_stored).tensor(),
                                .left_RM = p.h.tensor(),
                                .right_RN = p.x.tensor(),
                                .gather_right = p.c.gather,
                                .accumulate = accumulate,
                                .rows = p.rows()});
    run_expert_op<ExpertWgrad>(s, expert_wgrad,
                               {.dw_eMN = (accumulate ? o.dw2 : o.dw2_stored).tensor(),
                                .left_RM = p.dout.tensor(),
                                .right_RN = p.a.tensor(),
                                .gather_left = p.c.gather,
                                .accumulate = accumulate,
                                .rows = p.rows()});
  }
  expert_bias_grad(s, {.db_eN = o.db1.tensor(), .x_RM = p.h.tensor(), .rows = p.rows()});
  expert_bias_grad(s, {.db_eN = o.db2.tensor(),
                       .x_RM = p.dout.tensor(),
                       .weight_R = p.weight.tensor(),
                       .x_first = p.c.D / 3,
                       .gather = p.c.gather,
                       .rows = p.rows()});
  return o;
}

}  // namespace moebius::testing

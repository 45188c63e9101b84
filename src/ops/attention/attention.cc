#include "ops/attention/attention.h"

#include <algorithm>

#include "ops/attention/attention_backends.h"
#include "ops/attention/attention_scratch.h"
#include "ops/elementwise/elementwise.h"
#include "ops/op_checks.h"

namespace moebius {
namespace {

// The inputs that the forward and the backward pass have in common.
struct Inputs {
  const Tensor &q, &k, &v, &lse, &doc_start;
  int64_t batch, window;
  bool is_part;
};

// Checks queries [B Sq, H, d] and keys [B Skv, G, d] of one dtype, and the tensors with a row for each of them.
void check_inputs(const char* who, const Inputs& in) {
  const auto& [q, k, v, lse, doc_start, batch, window, is_part] = in;
  const DType dtype = q.dtype;
  MOEBIUS_CHECK(usage, dtype == DType::f32 || dtype == DType::bf16, "{}: q must be f32 or bf16; got {}", who,
                to_string(q));
  MOEBIUS_CHECK(usage, q.shape.rank() == 3 && k.shape.rank() == 3,
                "{}: q and k must be [rows, heads, d]; got {} and {}", who, to_string(q), to_string(k));
  const int64_t rows = q.dim(0), heads = q.dim(1), width = q.dim(2), kv_rows = k.dim(0), kv_heads = k.dim(1);
  MOEBIUS_CHECK(usage, batch >= 1 && rows % batch == 0 && kv_rows % batch == 0,
                "{}: batch {} must divide the rows of q {} and k {}", who, batch, to_string(q), to_string(k));
  MOEBIUS_CHECK(usage, is_part || rows <= kv_rows,
                "{}: a query sees itself, so k must have at least the rows of q; got q {} and k {}", who, to_string(q),
                to_string(k));
  MOEBIUS_CHECK(usage, width > 0 && kv_heads > 0 && heads % kv_heads == 0,
                "{}: the heads of k must divide those of q; got q {} and k {}", who, to_string(q), to_string(k));
  MOEBIUS_CHECK(usage, window >= 0, "{}: window must not be negative; got {}; 0 means no window", who, window);
  check_tensor(who, "q", q, dtype, {rows, heads, width});
  check_tensor(who, "k", k, dtype, {kv_rows, kv_heads, width});
  MOEBIUS_CHECK(usage, v.shape.rank() == 3 && v.dim(2) > 0, "{}: v must be [rows, heads, dv]; got {}", who,
                to_string(v));
  check_tensor(who, "v", v, dtype, {kv_rows, kv_heads, v.dim(2)});
  check_tensor(who, "lse", lse, DType::f32, {rows, heads});
  if (!doc_start.empty()) check_tensor(who, "doc_start", doc_start, DType::i32, {rows});
}

// Returns the shape of the output and of its gradient, [T, H, dv].
Shape output_shape(const Tensor& q, const Tensor& v) { return {q.dim(0), q.dim(1), v.dim(2)}; }

// Returns the number of keys that the queries at positions below x attend to, in a sequence without documents.
double seen_below(double x, double window) {
  if (window == 0 || x <= window) return x * (x + 1) / 2;
  return window * (window + 1) / 2 + (x - window) * window;
}

template <class Op>
void check_part(const char* who, const Op& a) {
  MOEBIUS_CHECK(usage, !a.is_part || (a.q_first >= 0 && a.kv_first >= 0),
                "{}: positions must not be negative; got {} of q and {} of k", who, a.q_first, a.kv_first);
}

// Returns the number of pairs of a query head and a key that it attends to. For a part, the window is not considered.
template <class Op>
double part_pairs(const Op& a, const Tensor& q, const Tensor& k) {
  const double kv = static_cast<double>(k.dim(0) / a.batch), rows = static_cast<double>(q.dim(0) / a.batch),
               first = static_cast<double>(a.q_first - a.kv_first);
  const double seen = seen_below(std::max(first + rows, 0.0), kv) - seen_below(std::max(first, 0.0), kv);
  return a.batch * seen * q.dim(1);
}
template <class Op>
double pairs(const Op& a, const Tensor& q, const Tensor& k) {
  if (a.is_part) return part_pairs(a, q, k);
  const int64_t batch = a.batch, window = a.window;
  const double kv = static_cast<double>(k.dim(0) / batch), first = kv - static_cast<double>(q.dim(0) / batch);
  return batch * (seen_below(kv, window) - seen_below(first, window)) * q.dim(1);
}

template <class Op>
int64_t scratch_bytes_of(const Op& a, const Stream& s) {
  if (s.target() != DeviceKind::cuda) return cpu::scratch_bytes(a, s.pool().size());
  return cuda::scratch_bytes(a, s.device() == DeviceKind::cuda ? gpu_kernels(s) : GpuKernels{});
}

// Returns the scratch that a call must have. On the null device it is unknown which kernels the plan counts for, so
// it is that of the portable ones, the least of all.
template <class Op>
int64_t required_bytes(const Op& a, const Stream& s) {
  return planned_scratch_bytes(a, s, {.is_hopper = false, .choice = KernelChoice::portable});
}

}  // namespace

int64_t AttentionFwd::scratch_bytes(const AttentionFwd& a, const Stream& s) { return scratch_bytes_of(a, s); }
int64_t AttentionBwd::scratch_bytes(const AttentionBwd& a, const Stream& s) { return scratch_bytes_of(a, s); }

void attention_fwd(Stream& s, const AttentionFwd& a) {
  const char* who = "attention_fwd";
  check_inputs(who, {a.q_THd, a.k_UGd, a.v_UGd, a.lse_TH, a.doc_start_T, a.batch, a.window, a.is_part});
  check_part(who, a);
  check_tensor(who, "o", a.o_THd, a.q_THd.dtype, output_shape(a.q_THd, a.v_UGd));
  if (!a.max_logit_H.empty()) check_tensor(who, "max_logit", a.max_logit_H, DType::f32, {a.q_THd.dim(1)});
  check_scratch(who, a.scratch, required_bytes(a, s));
  OpScope scope(s, who, cost(a));
  if (a.q_THd.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::attention_fwd(s, a);
    case DeviceKind::cuda:
      return cuda::attention_fwd(s, a);
    case DeviceKind::null:
      return;
  }
}

// Documents reduce the cost, but only the device has them.
Cost cost(const AttentionFwd& a) {
  const int64_t bytes =
      a.q_THd.num_bytes() + a.o_THd.num_bytes() + a.k_UGd.num_bytes() + a.v_UGd.num_bytes() + a.lse_TH.num_bytes();
  const double widths = static_cast<double>(a.q_THd.dim(2) + a.v_UGd.dim(2));
  return {2 * widths * pairs(a, a.q_THd, a.k_UGd), static_cast<double>(bytes)};
}

void attention_bwd(Stream& s, const AttentionBwd& a) {
  const char* who = "attention_bwd";
  check_inputs(who, {a.q_THd, a.k_TGd, a.v_TGd, a.lse_TH, a.doc_start_T, a.batch, a.window, a.is_part});
  check_part(who, a);
  MOEBIUS_CHECK(usage, a.is_part || a.q_THd.dim(0) == a.k_TGd.dim(0),
                "{}: q and k must have the same rows; got {} and {}", who, to_string(a.q_THd), to_string(a.k_TGd));
  check_tensor(who, "dq", a.dq_THd, a.q_THd.dtype, a.q_THd.shape);
  check_tensor(who, "dk", a.dk_TGd, a.q_THd.dtype, a.k_TGd.shape);
  check_tensor(who, "dv", a.dv_TGd, a.q_THd.dtype, a.v_TGd.shape);
  check_tensor(who, "do", a.do_THd, a.q_THd.dtype, output_shape(a.q_THd, a.v_TGd));
  check_tensor(who, "o", a.o_THd, a.q_THd.dtype, output_shape(a.q_THd, a.v_TGd));
  check_scratch(who, a.scratch, required_bytes(a, s));
  OpScope scope(s, who, cost(a));
  if (a.q_THd.empty()) {
    fill_zero(s, a.dk_TGd);
    return fill_zero(s, a.dv_TGd);
  }
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::attention_bwd(s, a);
    case DeviceKind::cuda:
      return cuda::attention_bwd(s, a);
    case DeviceKind::null:
      return;
  }
}

// There are five products: scores again, dk and dq with the width of q; dp and dv with the width of v.
Cost cost(const AttentionBwd& a) {
  const int64_t bytes = 2 * (a.q_THd.num_bytes() + a.o_THd.num_bytes() + a.k_TGd.num_bytes() + a.v_TGd.num_bytes()) +
                        a.lse_TH.num_bytes();
  const double widths = static_cast<double>(3 * a.q_THd.dim(2) + 2 * a.v_TGd.dim(2));
  return {2 * widths * pairs(a, a.q_THd, a.k_TGd), static_cast<double>(bytes)};
}

}  // namespace moebius

#include "ops/quantize/quantize.h"

#include "ops/quantize/quantize_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check_input(const char* who, const char* name, const Tensor& x) {
  MOEBIUS_CHECK(usage,
                (x.dtype == DType::f32 || x.dtype == DType::bf16) && (x.shape.rank() == 2 || x.shape.rank() == 3),
                "{}: {} must be an f32 or bf16 matrix, or one for each expert; got {}", who, name, to_string(x));
  check_tensor(who, name, x, x.dtype, x.shape);
}

int64_t num_matrices(const Shape& data) { return data.rank() == 3 ? data[0] : 1; }

// The rows of x by expert, and how many columns their transpose has.
void check_groups(const Quantize& a) {
  constexpr const char* who = "quantize";
  const int64_t e = a.offsets_e1.numel() - 1;
  MOEBIUS_CHECK(usage, a.x_RC.shape.rank() == 2 && e >= 1,
                "{}: rows with offsets must be a matrix, and the offsets i32 [experts + 1]; got {} and {}", who,
                to_string(a.x_RC), to_string(a.offsets_e1));
  check_tensor(who, "offsets", a.offsets_e1, DType::i32, {e + 1});
  const int64_t R = a.token_R.empty() ? a.x_RC.dim(0) : a.token_R.numel();
  if (!a.token_R.empty()) check_tensor(who, "token", a.token_R, DType::i32, {R});
  MOEBIUS_CHECK(usage, a.q.transposed || a.token_R.empty(), "{}: only a transposed copy gathers rows by token; got {}",
                who, to_string(a.q));
  const int64_t rows = a.q.transposed ? padded_rows(R, e) : R;
  const Shape expected{rows, a.x_RC.dim(1)};
  MOEBIUS_CHECK(usage, a.q.shape() == expected, "{}: q of {} rows of {} experts must be a copy of {}; got {}", who, R,
                e, to_string(expected), to_string(a.q));
}

void check(const Quantize& a) {
  constexpr const char* who = "quantize";
  check_input(who, "x", a.x_RC);
  check_quantised(who, "q", a.q);
  MOEBIUS_CHECK(usage, a.q.data.dtype != DType::f4_e2m1 || a.q.layout == ScaleLayout::nv_blocks,
                "{}: q of f4_e2m1 must have nv_blocks; got {}", who, to_string(a.q));
  const bool is_nv = a.q.layout == ScaleLayout::nv_blocks;
  MOEBIUS_CHECK(usage, is_nv || !(a.square || a.hadamard || !a.stochastic.draw_2.empty()),
                "{}: square blocks of 16, the Hadamard transform and stochastic rounding are of nv_blocks; got {}", who,
                to_string(a.q));
  if (!a.stochastic.draw_2.empty()) check_tensor(who, "draw", a.stochastic.draw_2, DType::i64, {2});
  MOEBIUS_CHECK(usage, !a.hadamard || a.q.data.dim(a.q.data.shape.rank() - 1) % 16 == 0,
                "{}: the Hadamard transform needs a multiple of 16 columns; got {}", who, to_string(a.q));
  if (!a.stats_5.empty()) check_tensor(who, "stats", a.stats_5, DType::f64, {5});
  if (!a.magnitude_WB.empty()) {
    const int64_t B = a.magnitude_WB.dim(a.magnitude_WB.shape.rank() - 1), e = num_matrices(a.q.data.shape);
    MOEBIUS_CHECK(usage, is_nv || a.q.layout == ScaleLayout::per_tensor,
                  "{}: magnitudes of ranks are for a scale of a whole tensor; got {}", who, to_string(a.q));
    MOEBIUS_CHECK(usage, a.magnitude_WB.shape.rank() == 2 && a.first_matrix >= 0 && a.first_matrix + e <= B,
                  "{}: magnitudes must be i32 [ranks, matrices], with columns {} to {}; got {}", who, a.first_matrix,
                  a.first_matrix + e - 1, to_string(a.magnitude_WB));
    check_tensor(who, "magnitudes", a.magnitude_WB, DType::i32, a.magnitude_WB.shape);
  }
  if (!a.offsets_e1.empty()) return check_groups(a);
  MOEBIUS_CHECK(usage, a.token_R.empty(), "{}: rows that are gathered by token need offsets", who);
  const Shape padded = a.x_RC.shape.rank() == 2 ? Shape{padded_rows(a.x_RC.dim(0)), a.x_RC.dim(1)} : a.x_RC.shape;
  MOEBIUS_CHECK(usage, a.q.shape() == a.x_RC.shape || (a.q.transposed && a.q.shape() == padded),
                "{}: q must be a copy of x {}; got {}", who, to_string(a.x_RC), to_string(a.q));
}

void check(const LargestMagnitudes& a) {
  constexpr const char* who = "largest_magnitudes";
  const Operand& q = a.of.q;
  check_input(who, "x", a.of.x_RC);
  MOEBIUS_CHECK(usage, q.layout == ScaleLayout::per_tensor || q.layout == ScaleLayout::nv_blocks,
                "{}: only per_tensor and nv_blocks have a scale of a whole tensor; got {}", who, to_string(q));
  check_tensor(who, "bits", a.bits_e, DType::i32, {num_matrices(q.data.shape)});
  if (!a.of.offsets_e1.empty()) check_groups(a.of);
}

void check(const TransposeQuantized& a) {
  constexpr const char* who = "transpose_quantized";
  check_quantised(who, "out", a.out);
  check_quantised(who, "in", a.in);
  MOEBIUS_CHECK(usage,
                a.in.layout == a.out.layout && a.in.data.dtype == a.out.data.dtype &&
                    a.in.transposed != a.out.transposed && a.in.shape() == a.out.shape(),
                "{}: expected an operand and its transpose, of one format; got {} and {}", who, to_string(a.out),
                to_string(a.in));
  MOEBIUS_CHECK(usage, a.in.layout == ScaleLayout::square_blocks || a.in.layout == ScaleLayout::per_tensor,
                "{}: only square_blocks and per_tensor scales have an exact transpose; got {}; quantize both from the "
                "same values instead",
                who, to_string(a.in));
}

void check(const Dequantize& a) {
  constexpr const char* who = "dequantize";
  check_quantised(who, "q", a.q);
  check_input(who, "x", a.x);
  check_tensor(who, "x", a.x, a.x.dtype, a.q.data.shape);
}

void check(const DequantizeTransposed& a) {
  constexpr const char* who = "dequantize_transposed";
  check_quantised(who, "q", a.q);
  check_input(who, "x", a.x_RC);
  const Shape& x = a.x_RC.shape;
  Shape expected = x;
  if (!a.offsets_e1.empty()) {
    check_tensor(who, "offsets", a.offsets_e1, DType::i32, {a.offsets_e1.numel()});
    MOEBIUS_CHECK(usage, x.rank() == 2, "{}: rows with offsets must be a matrix; got {}", who, to_string(a.x_RC));
    expected = {padded_rows(x[0], a.offsets_e1.numel() - 1), x[1]};
  }
  const bool is_padded = a.offsets_e1.empty() && x.rank() == 2 && a.q.shape() == Shape{padded_rows(x[0]), x[1]};
  MOEBIUS_CHECK(usage, a.q.transposed && (a.q.shape() == expected || is_padded),
                "{}: q must be a transposed copy of x {}, with {} rows of it; got {}", who, to_string(a.x_RC),
                expected[expected.rank() - 2], to_string(a.q));
  MOEBIUS_CHECK(usage, !a.hadamard || a.q.data.dim(a.q.data.shape.rank() - 1) % 16 == 0,
                "{}: the Hadamard transform is one of 16 columns; got {} of them", who,
                a.q.data.dim(a.q.data.shape.rank() - 1));
}

double bytes_of(const Operand& q) { return static_cast<double>(q.data.num_bytes() + q.scales.num_bytes()); }

}  // namespace

void quantize(Stream& s, const Quantize& a) {
  check(a);
  OpScope scope(s, "quantize", cost(a));
  if (a.q.data.empty()) return;
  run_on_device(s, cpu::quantize, cuda::quantize, a);
}

// Counts a comparison and a product for each element.
Cost cost(const Quantize& a) {
  const double count = static_cast<double>(a.q.data.numel());
  return {2 * count, count * static_cast<double>(size_of(a.x_RC.dtype)) + bytes_of(a.q)};
}

void largest_magnitudes(Stream& s, const LargestMagnitudes& a) {
  check(a);
  OpScope scope(s, "largest_magnitudes", cost(a));
  run_on_device(s, cpu::largest_magnitudes, cuda::largest_magnitudes, a);
}

Cost cost(const LargestMagnitudes& a) {
  const double count = static_cast<double>(a.of.q.data.numel());
  return {count, count * static_cast<double>(size_of(a.of.x_RC.dtype)) + static_cast<double>(a.bits_e.num_bytes())};
}

void transpose_quantized(Stream& s, const TransposeQuantized& a) {
  check(a);
  OpScope scope(s, "transpose_quantized", cost(a));
  if (a.in.data.empty()) return;
  run_on_device(s, cpu::transpose_quantized, cuda::transpose_quantized, a);
}

Cost cost(const TransposeQuantized& a) { return {0, bytes_of(a.in) + bytes_of(a.out)}; }

void dequantize(Stream& s, const Dequantize& a) {
  check(a);
  OpScope scope(s, "dequantize", cost(a));
  if (a.x.empty()) return;
  run_on_device(s, cpu::dequantize, cuda::dequantize, a);
}

void dequantize_transposed(Stream& s, const DequantizeTransposed& a) {
  check(a);
  OpScope scope(s, "dequantize_transposed", cost(a));
  if (a.x_RC.empty()) return;
  run_on_device(s, cpu::dequantize_transposed, cuda::dequantize_transposed, a);
}

Cost cost(const DequantizeTransposed& a) {
  return {static_cast<double>(a.x_RC.numel()), static_cast<double>(a.x_RC.num_bytes()) + bytes_of(a.q)};
}

Cost cost(const Dequantize& a) {
  return {static_cast<double>(a.x.numel()), static_cast<double>(a.x.num_bytes()) + bytes_of(a.q)};
}

}  // namespace moebius

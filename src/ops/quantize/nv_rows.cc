#include "ops/quantize/nv_rows.h"

#include "ops/quantize/quantize_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check_ints(const char* who, const char* name, const Tensor& t, const Shape& shape) {
  if (!t.empty()) check_tensor(who, name, t, DType::i32, shape);
}

void check_rows(const char* who, const NvRows& a) {
  const Tensor& x = a.x_NC;
  MOEBIUS_CHECK(usage, (x.dtype == DType::f32 || x.dtype == DType::bf16) && x.shape.rank() == 2,
                "{}: x must be an f32 or bf16 matrix; got {}", who, to_string(x));
  check_tensor(who, "x", x, x.dtype, x.shape);
  const int64_t R = a.num_rows();
  check_ints(who, "token", a.token_R, {R});
  check_ints(who, "offsets", a.offsets_g1, {a.offsets_g1.numel()});
  check_ints(who, "order", a.order_R, {R});
  check_ints(who, "source", a.source_R, {a.source_R.numel()});
  check_ints(who, "index", a.index_N, {a.index_N.numel()});
  MOEBIUS_CHECK(usage, a.order_R.empty() || (a.hadamard && !a.offsets_g1.empty()),
                "{}: an order of rows is for the Hadamard transform of groups", who);
  MOEBIUS_CHECK(usage, a.num_batches >= 1 && a.batch_tokens >= 1,
                "{}: expected micro-batches of at least one token; got {} of {} tokens", who, a.num_batches,
                a.batch_tokens);
}

double bytes_of(const NvRows& a) {
  return static_cast<double>(a.num_rows()) * static_cast<double>(a.x_NC.dim(1) * size_of(a.x_NC.dtype));
}

void check(const NvMagnitudes& a) {
  constexpr const char* who = "nv_magnitudes";
  check_rows(who, a.of);
  check_tensor(who, "bits", a.bits_M, DType::i32, {a.of.num_batches});
}

void check(const NvRound& a) {
  constexpr const char* who = "nv_round";
  check_rows(who, a.of);
  check_tensor(who, "y", a.y_RC, a.of.x_NC.dtype, {a.of.num_rows(), a.of.x_NC.dim(1)});
  const Tensor& m = a.magnitude_WB;
  MOEBIUS_CHECK(usage, m.shape.rank() == 2 && a.first_batch >= 0 && a.first_batch + a.of.num_batches <= m.dim(1),
                "{}: magnitudes must be i32 [ranks, micro-batches], with columns {} to {}; got {}", who, a.first_batch,
                a.first_batch + a.of.num_batches - 1, to_string(m));
  check_tensor(who, "magnitudes", m, DType::i32, m.shape);
  MOEBIUS_CHECK(usage, !a.draws_elements || !a.draws.draw_2.empty(), "{}: elements are drawn by draw; it is missing",
                who);
  if (!a.draws.draw_2.empty()) check_tensor(who, "draw", a.draws.draw_2, DType::i64, {2});
  const int runs = a.draws.columns.num_runs;
  MOEBIUS_CHECK(usage, runs >= 1 && runs <= WholeColumns::kMaxRuns, "{}: expected 1 to {} runs of columns; got {}", who,
                WholeColumns::kMaxRuns, runs);
  if (!a.stats_5.empty()) check_tensor(who, "stats", a.stats_5, DType::f64, {5});
}

void check(const NvOrder& a) {
  constexpr const char* who = "nv_order";
  const int64_t e = a.offsets_e1.numel() - 1;
  MOEBIUS_CHECK(usage, e >= 1 && a.num_batches >= 1 && a.batch_tokens >= 1,
                "{}: expected rows of experts, and micro-batches; got {} experts and {} micro-batches of {} tokens",
                who, e, a.num_batches, a.batch_tokens);
  check_tensor(who, "offsets", a.offsets_e1, DType::i32, {e + 1});
  check_tensor(who, "order", a.order_R, DType::i32, {a.order_R.numel()});
  check_ints(who, "source", a.source_R, {a.order_R.numel()});
  check_tensor(who, "index", a.index_N, DType::i32, {a.index_N.numel()});
  check_tensor(who, "offsets of micro-batches", a.offsets_of_batches, DType::i32, {e * a.num_batches + 1});
}

}  // namespace

void nv_magnitudes(Stream& s, const NvMagnitudes& a) {
  check(a);
  OpScope scope(s, "nv_magnitudes", cost(a));
  run_on_device(s, cpu::nv_magnitudes, cuda::nv_magnitudes, a);
}

Cost cost(const NvMagnitudes& a) {
  return {bytes_of(a.of) / static_cast<double>(size_of(a.of.x_NC.dtype)), bytes_of(a.of)};
}

void nv_round(Stream& s, const NvRound& a) {
  check(a);
  OpScope scope(s, "nv_round", cost(a));
  if (a.y_RC.numel() == 0) return;
  run_on_device(s, cpu::nv_round, cuda::nv_round, a);
}

// Counts a comparison and a product for each element.
Cost cost(const NvRound& a) {
  return {2 * bytes_of(a.of) / static_cast<double>(size_of(a.of.x_NC.dtype)), 2 * bytes_of(a.of)};
}

void nv_order(Stream& s, const NvOrder& a) {
  check(a);
  OpScope scope(s, "nv_order", {0, 2 * static_cast<double>(a.order_R.num_bytes())});
  run_on_device(s, cpu::nv_order, cuda::nv_order, a);
}

}  // namespace moebius

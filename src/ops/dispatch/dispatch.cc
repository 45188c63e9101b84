#include "ops/dispatch/dispatch.h"

#include <algorithm>

#include "ops/dispatch/destination_blocks.h"
#include "ops/dispatch/dispatch_backends.h"
#include "ops/op_checks.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

void check_matrix(const char* who, const char* name, const Tensor& t, const char* shape) {
  MOEBIUS_CHECK(usage, t.shape.rank() == 2, "{}: {} must be {}; got {}", who, name, shape, to_string(t));
}
void check_ints(const char* who, const char* name, const Tensor& t, const Shape& shape) {
  check_tensor(who, name, t, DType::i32, shape);
}
// Checks the arguments that every op that writes to windows has. Returns the number of ranks.
int64_t check_windows(const char* who, const Tensor& sent_1, const Tensor& bases_W, int64_t rank) {
  check_tensor(who, "sent", sent_1, DType::i64, {1});
  check_tensor(who, "bases", bases_W, DType::i64, {bases_W.numel()});
  MOEBIUS_CHECK(usage, rank >= 0 && rank < bases_W.numel(), "{}: the rank must be one of {}; got {}", who,
                bases_W.numel(), rank);
  return bases_W.numel();
}

void check(const Destinations& a, const Stream& s) {
  check_matrix("destinations", "topk", a.topk_TK, "[T, K]");
  MOEBIUS_CHECK(usage, a.experts_of_rank >= 1 && a.count_P.numel() >= 1,
                "destinations: experts_of_rank and the length of count must be at least 1; got {} and {}",
                a.experts_of_rank, a.count_P.numel());
  const int64_t T = a.topk_TK.dim(0), J = std::min(a.topk_TK.dim(1), a.count_P.numel());
  check_ints("destinations", "topk", a.topk_TK, a.topk_TK.shape);
  if (!a.kept_TK.empty()) check_ints("destinations", "kept", a.kept_TK, a.topk_TK.shape);
  check_ints("destinations", "dest", a.dest_TJ, {T, J});
  check_ints("destinations", "slot", a.slot_TJ, {T, J});
  check_ints("destinations", "count", a.count_P, {a.count_P.numel()});
  check_scratch("destinations", a.scratch, Destinations::scratch_bytes(T, a.count_P.numel(), s));
}

void check(const DispatchPlaces& a) {
  check_matrix("dispatch_places", "dest", a.dest_TJ, "[T, J]");
  check_matrix("dispatch_places", "counts", a.counts_WP, "[W, P]");
  const int64_t W = a.counts_WP.dim(0), P = a.counts_WP.dim(1), T = a.dest_TJ.dim(0), J = a.dest_TJ.dim(1);
  MOEBIUS_CHECK(usage, P >= 1 && W % P == 0 && a.rank >= 0 && a.rank < W,
                "dispatch_places: counts must be [W, P] where P divides W, and the rank one of W; got {} and {}",
                to_string(a.counts_WP), a.rank);
  check_ints("dispatch_places", "dest", a.dest_TJ, {T, J});
  check_ints("dispatch_places", "slot", a.slot_TJ, {T, J});
  check_ints("dispatch_places", "counts", a.counts_WP, {W, P});
  check_ints("dispatch_places", "row", a.row_TJ, {T, J});
  check_ints("dispatch_places", "back_row", a.back_row_TB, {T, J * (W / P)});
  check_ints("dispatch_places", "arrive", a.arrive_W1, {W + 1});
  check_ints("dispatch_places", "back", a.back_W, {W});
}

void check(const ContiguousPlaces& a) {
  check_matrix("contiguous_places", "dest", a.dest_TJ, "[T, J]");
  const int64_t T = a.dest_TJ.dim(0), P = a.dest_TJ.dim(1), W = a.back_W.numel();
  MOEBIUS_CHECK(usage, P >= 1 && W % P == 0 && a.rank >= 0 && a.rank < W,
                "contiguous_places: P must divide the W ranks, and the rank be one of them; got P {}, W {}, rank {}", P,
                W, a.rank);
  check_ints("contiguous_places", "dest", a.dest_TJ, {T, P});
  check_ints("contiguous_places", "row", a.row_TJ, {T, P});
  check_ints("contiguous_places", "back_row", a.back_row_TB, {T, W});
  check_ints("contiguous_places", "arrive", a.arrive_W1, {W + 1});
  check_ints("contiguous_places", "back", a.back_W, {W});
}

void check(const PushRows& a) {
  const int64_t W = check_windows("push_rows", a.sent_1, a.bases_W, a.rank);
  MOEBIUS_CHECK(usage, a.etp >= 1 && W % a.etp == 0, "push_rows: etp must divide the {} ranks; got {}", W, a.etp);
  check_matrix("push_rows", "x", a.x_TD, "[T, D]");
  check_matrix("push_rows", "dest", a.dest_TJ, "[T, J]");
  check_ints("push_rows", "dest", a.dest_TJ, {a.x_TD.dim(0), a.dest_TJ.dim(1)});
  check_ints("push_rows", "row", a.row_TJ, a.dest_TJ.shape);
  const auto num_windows = static_cast<int64_t>(a.windows.size());
  MOEBIUS_CHECK(usage, num_windows == 0 || (num_windows == W && a.dest_TJ.dim(1) * a.etp == W),
                "push_rows: windows may be given only for rows that go to all ranks, and then those of all {}; got {} "
                "windows and {} destinations of {} ranks",
                W, num_windows, a.dest_TJ.dim(1), a.etp);
}

void check(const PushToAll& a) {
  check_windows("push_to_all", a.sent_1, a.bases_W, a.rank);
  check_tensor("push_to_all", "x", a.x_M, a.x_M.dtype, {a.x_M.numel()});
}

void check(const SortedPlaces& a) {
  check_matrix("sorted_places", "dest", a.dest_TJ, "[T, J]");
  const Shape& row = a.row_GTJ.shape;
  const int64_t T = a.dest_TJ.dim(0), J = a.dest_TJ.dim(1), P = a.count_P.numel();
  MOEBIUS_CHECK(
      usage, row.rank() == 3 && row[0] >= 1 && P % row[0] == 0 && a.last >= 0 && a.last < P && a.section >= 0,
      "sorted_places: row must be [G, T, J] where G divides the {} destinations, last one of these, and section at "
      "least 0; got {}, {} and {}",
      P, to_string(a.row_GTJ), a.last, a.section);
  check_ints("sorted_places", "dest", a.dest_TJ, {T, J});
  check_ints("sorted_places", "slot", a.slot_TJ, {T, J});
  check_ints("sorted_places", "count", a.count_P, {P});
  check_ints("sorted_places", "row", a.row_GTJ, {row[0], T, J});
}

void check(const SpreadRows& a) {
  check_matrix("spread_rows", "array", a.array_SD, "[S, D]");
  check_matrix("spread_rows", "x", a.x_TD, "[T, D]");
  check_matrix("spread_rows", "row", a.row_TJ, "[T, J]");
  check_tensor("spread_rows", "array", a.array_SD, a.x_TD.dtype, {a.array_SD.dim(0), a.x_TD.dim(1)});
  check_tensor("spread_rows", "x", a.x_TD, a.x_TD.dtype, a.x_TD.shape);
  check_ints("spread_rows", "row", a.row_TJ, {a.x_TD.dim(0), a.row_TJ.dim(1)});
}

void check(const PackRoutes& a) {
  check_matrix("pack_routes", "topk", a.topk_TK, "[T, K]");
  check_ints("pack_routes", "topk", a.topk_TK, a.topk_TK.shape);
  if (!a.kept_TK.empty()) check_ints("pack_routes", "kept", a.kept_TK, a.topk_TK.shape);
  check_tensor("pack_routes", "weight", a.weight_TK, DType::f32, a.topk_TK.shape);
  check_ints("pack_routes", "routes", a.routes_T2K, {a.topk_TK.dim(0), 2 * a.topk_TK.dim(1)});
}

void check(const SelectRoutes& a) {
  check_matrix("select_routes", "topk", a.topk_NK, "[N, K]");
  check_ints("select_routes", "topk", a.topk_NK, a.topk_NK.shape);
  check_tensor("select_routes", "weight", a.weight_NK, DType::f32, a.topk_NK.shape);
  check_ints("select_routes", "routes", a.routes_N2K, {a.topk_NK.dim(0), 2 * a.topk_NK.dim(1)});
}

void check(const PushRoutes& a) {
  const int64_t W = check_windows("push_routes", a.sent_1, a.bases_W, a.rank);
  MOEBIUS_CHECK(usage, a.etp >= 1 && W % a.etp == 0 && a.experts_of_rank >= 1,
                "push_routes: etp must divide the {} ranks, and a rank must have experts; got {} and {}", W, a.etp,
                a.experts_of_rank);
  check_matrix("push_routes", "topk", a.topk_TK, "[T, K]");
  check_matrix("push_routes", "dest", a.dest_TJ, "[T, J]");
  check_ints("push_routes", "topk", a.topk_TK, a.topk_TK.shape);
  if (!a.kept_TK.empty()) check_ints("push_routes", "kept", a.kept_TK, a.topk_TK.shape);
  check_tensor("push_routes", "weight", a.weight_TK, DType::f32, a.topk_TK.shape);
  check_ints("push_routes", "dest", a.dest_TJ, {a.topk_TK.dim(0), a.dest_TJ.dim(1)});
  check_ints("push_routes", "row", a.row_TJ, a.dest_TJ.shape);
}

void check(const ReturnSums& a) {
  const int64_t W = check_windows("return_sums", a.sent_1, a.bases_W, a.rank);
  const DType dtype = a.y_RD.dtype;
  MOEBIUS_CHECK(usage, (dtype == DType::f32 || dtype == DType::bf16) && a.y_RD.shape.rank() == 2,
                "return_sums: y must be f32 or bf16 [R, D]; got {}", to_string(a.y_RD));
  check_matrix("return_sums", "pair_row", a.pair_row_NL, "[N, L]");
  check_ints("return_sums", "pair_row", a.pair_row_NL, a.pair_row_NL.shape);
  if (!a.weight_NL.empty()) check_tensor("return_sums", "weight", a.weight_NL, DType::f32, a.pair_row_NL.shape);
  check_ints("return_sums", "arrive", a.arrive_W1, {W + 1});
  check_ints("return_sums", "back", a.back_W, {W});
}

void check(const ReturnPairs& a) {
  const int64_t W = check_windows("return_pairs", a.sent_1, a.bases_W, a.rank);
  check_tensor("return_pairs", "from", a.from_R, DType::f32, {a.from_R.numel()});
  check_matrix("return_pairs", "pair_row", a.pair_row_NL, "[N, L]");
  check_ints("return_pairs", "pair_row", a.pair_row_NL, a.pair_row_NL.shape);
  check_ints("return_pairs", "arrive", a.arrive_W1, {W + 1});
  check_ints("return_pairs", "back", a.back_W, {W});
}

void check(const SumPairs& a) {
  check_matrix("sum_pairs", "topk", a.topk_TK, "[T, K]");
  check_matrix("sum_pairs", "from", a.from_BL, "[B, L]");
  check_matrix("sum_pairs", "dest", a.dest_TJ, "[T, J]");
  check_matrix("sum_pairs", "back_row", a.back_row_TB, "[T, J ETP]");
  const int64_t T = a.topk_TK.dim(0), J = a.dest_TJ.dim(1), B = a.back_row_TB.dim(1);
  MOEBIUS_CHECK(
      usage, J >= 1 && B % J == 0 && a.experts_of_rank >= 1,
      "sum_pairs: back_row must have ETP columns for each of the {} columns of dest, and experts_of_rank be at "
      "least 1; got {} and {}",
      J, to_string(a.back_row_TB), a.experts_of_rank);
  check_tensor("sum_pairs", "to", a.to_TK, DType::f32, a.topk_TK.shape);
  check_tensor("sum_pairs", "from", a.from_BL, DType::f32, a.from_BL.shape);
  check_ints("sum_pairs", "topk", a.topk_TK, a.topk_TK.shape);
  if (!a.kept_TK.empty()) check_ints("sum_pairs", "kept", a.kept_TK, a.topk_TK.shape);
  check_ints("sum_pairs", "dest", a.dest_TJ, {T, J});
  check_ints("sum_pairs", "back_row", a.back_row_TB, {T, B});
}

void check(const PartRows& a) {
  check_matrix("part_rows", "dest", a.dest_TJ, "[T, J]");
  check_matrix("part_rows", "pair_row", a.pair_row_NL, "[N, L]");
  const int64_t e = a.offsets_e1.numel() - 1, W = a.arrive_W1.numel() - 1, R = a.row_token_R.numel();
  MOEBIUS_CHECK(
      usage, e >= 1 && a.etp >= 1 && W >= 1 && W % a.etp == 0 && a.rank >= 0 && a.rank < W,
      "part_rows: there must be experts, and the rank must be one of W, which etp divides; got {} experts, rank "
      "{} of {} and etp {}",
      e, a.rank, W, a.etp);
  check_ints("part_rows", "own", a.own_2e, {2, e});
  MOEBIUS_CHECK(usage, a.far_from >= 1 && a.far_from <= W, "part_rows: far_from must be in [1, {}]; got {}", W,
                a.far_from);
  if (a.far_from > 1) check_ints("part_rows", "near", a.near_22e, {2, 2 * e});
  check_ints("part_rows", "far", a.far_22e, {2, 2 * e});
  check_ints("part_rows", "own_token", a.own_token_R, {R});
  check_ints("part_rows", "offsets", a.offsets_e1, {e + 1});
  check_ints("part_rows", "row_token", a.row_token_R, {R});
  check_ints("part_rows", "arrive", a.arrive_W1, {W + 1});
  check_ints("part_rows", "dest", a.dest_TJ, a.dest_TJ.shape);
  check_ints("part_rows", "row", a.row_TJ, a.dest_TJ.shape);
  check_ints("part_rows", "pair_row", a.pair_row_NL, a.pair_row_NL.shape);
}

}  // namespace

int64_t Destinations::scratch_bytes(int64_t num_tokens, int64_t num_ranks, const Stream& s) {
  return s.target() == DeviceKind::cuda ? cuda::destination_scratch_bytes(num_tokens, num_ranks) : 0;
}

void destinations(Stream& s, const Destinations& a) {
  check(a, s);
  OpScope scope(s, "destinations", {0, bytes_of(a.topk_TK) + bytes_of(a.kept_TK) + 2 * bytes_of(a.dest_TJ)});
  run_on_device(s, cpu::destinations, cuda::destinations, a);
}

void dispatch_places(Stream& s, const DispatchPlaces& a) {
  check(a);
  OpScope scope(s, "dispatch_places", {0, 3 * bytes_of(a.dest_TJ) + bytes_of(a.back_row_TB) + bytes_of(a.counts_WP)});
  run_on_device(s, cpu::dispatch_places, cuda::dispatch_places, a);
}

void contiguous_places(Stream& s, const ContiguousPlaces& a) {
  check(a);
  OpScope scope(s, "contiguous_places", {0, 2 * bytes_of(a.dest_TJ) + bytes_of(a.back_row_TB)});
  run_on_device(s, cpu::contiguous_places, cuda::contiguous_places, a);
}

void push_rows(Stream& s, const PushRows& a) {
  check(a);
  const double rows = static_cast<double>(a.dest_TJ.dim(1));  // rows of a token
  const int64_t W = a.bases_W.numel();
  const double part = static_cast<double>(a.of.count(W)) / static_cast<double>(W);
  OpScope scope(s, "push_rows", {0, bytes_of(a.x_TD) * (1 + part * rows) + 2 * bytes_of(a.dest_TJ)});
  if (a.x_TD.empty() || a.dest_TJ.empty()) return;
  run_on_device(s, cpu::push_rows, cuda::push_rows, a);
}

void push_to_all(Stream& s, const PushToAll& a) {
  check(a);
  OpScope scope(s, "push_to_all", {0, bytes_of(a.x_M) * static_cast<double>(1 + a.bases_W.numel())});
  if (a.x_M.empty()) return;
  run_on_device(s, cpu::push_to_all, cuda::push_to_all, a);
}

void sorted_places(Stream& s, const SortedPlaces& a) {
  check(a);
  OpScope scope(s, "sorted_places", {0, 2 * bytes_of(a.dest_TJ) + bytes_of(a.row_GTJ)});
  if (a.row_GTJ.empty()) return;
  run_on_device(s, cpu::sorted_places, cuda::sorted_places, a);
}

void spread_rows(Stream& s, const SpreadRows& a) {
  check(a);
  const double rows = static_cast<double>(a.row_TJ.dim(1));  // rows of a token
  OpScope scope(s, "spread_rows", {0, bytes_of(a.x_TD) * (1 + rows) + bytes_of(a.row_TJ)});
  if (a.x_TD.empty() || a.row_TJ.empty()) return;
  run_on_device(s, cpu::spread_rows, cuda::spread_rows, a);
}

void pack_routes(Stream& s, const PackRoutes& a) {
  check(a);
  OpScope scope(s, "pack_routes", {0, 2 * bytes_of(a.routes_T2K) + bytes_of(a.kept_TK)});
  if (a.topk_TK.empty()) return;
  run_on_device(s, cpu::pack_routes, cuda::pack_routes, a);
}

void select_routes(Stream& s, const SelectRoutes& a) {
  check(a);
  OpScope scope(s, "select_routes", {0, 2 * bytes_of(a.routes_N2K)});
  if (a.topk_NK.empty()) return;
  run_on_device(s, cpu::select_routes, cuda::select_routes, a);
}

void push_routes(Stream& s, const PushRoutes& a) {
  check(a);
  const double rows = static_cast<double>(a.dest_TJ.dim(1));  // rows of a token
  const double pairs = bytes_of(a.topk_TK) + bytes_of(a.weight_TK);
  OpScope scope(s, "push_routes", {0, pairs * (1 + rows) + bytes_of(a.kept_TK) + 2 * bytes_of(a.dest_TJ)});
  if (a.topk_TK.empty() || a.dest_TJ.empty()) return;
  run_on_device(s, cpu::push_routes, cuda::push_routes, a);
}

Cost cost(const ReturnSums& a) {
  const double pairs = static_cast<double>(a.expected_pairs > 0 ? a.expected_pairs : a.pair_row_NL.numel());
  const double rows = static_cast<double>(a.expected_rows > 0 ? a.expected_rows : a.pair_row_NL.dim(0));
  const double row_bytes = static_cast<double>(a.y_RD.dim(1) * size_of(a.y_RD.dtype));
  return {2 * pairs * static_cast<double>(a.y_RD.dim(1)),
          (pairs + rows) * row_bytes + bytes_of(a.pair_row_NL) + bytes_of(a.weight_NL)};
}

void return_sums(Stream& s, const ReturnSums& a) {
  check(a);
  OpScope scope(s, "return_sums", cost(a));
  if (a.pair_row_NL.empty() || a.y_RD.dim(1) == 0) return;
  run_on_device(s, cpu::return_sums, cuda::return_sums, a);
}

void return_pairs(Stream& s, const ReturnPairs& a) {
  check(a);
  OpScope scope(s, "return_pairs", {0, 3 * bytes_of(a.pair_row_NL)});
  if (a.pair_row_NL.empty()) return;
  run_on_device(s, cpu::return_pairs, cuda::return_pairs, a);
}

void sum_pairs(Stream& s, const SumPairs& a) {
  check(a);
  OpScope scope(s, "sum_pairs", {0, 3 * bytes_of(a.to_TK) + bytes_of(a.dest_TJ) + bytes_of(a.back_row_TB)});
  if (a.to_TK.empty()) return;
  run_on_device(s, cpu::sum_pairs, cuda::sum_pairs, a);
}

void part_rows(Stream& s, const PartRows& a) {
  check(a);
  OpScope scope(s, "part_rows", {0, 2 * bytes_of(a.dest_TJ) + 2 * bytes_of(a.own_token_R)});
  run_on_device(s, cpu::part_rows, cuda::part_rows, a);
}

}  // namespace moebius

#include "ops/permute/index_rows.h"

#include <algorithm>

#include "ops/op_checks.h"
#include "ops/permute/index_rows_blocks.h"
#include "ops/permute/permute_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

double bytes_of(const Tensor& t) { return static_cast<double>(t.num_bytes()); }

constexpr int64_t kMaxExperts = 1024;

int64_t num_experts(const char* who, const Tensor& offsets_e1) {
  MOEBIUS_CHECK(usage, offsets_e1.shape.rank() == 1 && offsets_e1.numel() >= 2,
                "{}: offsets must be i32 [e + 1]; got {}", who, to_string(offsets_e1));
  check_tensor(who, "offsets", offsets_e1, DType::i32, offsets_e1.shape);
  return offsets_e1.numel() - 1;
}

int64_t sorted_experts(const char* who, const Tensor& offsets_e1) {
  const int64_t e = num_experts(who, offsets_e1);
  MOEBIUS_CHECK(usage, e <= kMaxExperts, "{}: at most {} experts; got {}", who, kMaxExperts, e);
  return e;
}

void check_row_token(const char* who, const Tensor& row_token_R, int64_t most) {
  MOEBIUS_CHECK(usage, row_token_R.numel() >= most, "{}: row_token must have at least {} rows; got {}", who, most,
                to_string(row_token_R));
  check_tensor(who, "row_token", row_token_R, DType::i32, {row_token_R.numel()});
}

void check(const IndexRows& a, const Stream& s) {
  constexpr const char* who = "index_rows";
  const int64_t e = sorted_experts(who, a.offsets_e1);
  MOEBIUS_CHECK(usage, a.topk_TK.shape.rank() == 2, "{}: topk must be i32 [T, K]; got {}", who, to_string(a.topk_TK));
  check_tensor(who, "topk", a.topk_TK, DType::i32, a.topk_TK.shape);
  check_tensor(who, "pair_row", a.pair_row_TK, DType::i32, a.topk_TK.shape);
  if (!a.kept_TK.empty()) check_tensor(who, "kept", a.kept_TK, DType::i32, a.topk_TK.shape);
  if (!a.counts_e.empty()) check_tensor(who, "counts", a.counts_e, DType::i32, {e});
  check_row_token(who, a.row_token_R, a.topk_TK.dim(0) * std::min(a.topk_TK.dim(1), e));
  if (!a.row_pair_R.empty()) check_tensor(who, "row_pair", a.row_pair_R, DType::i32, a.row_token_R.shape);
  check_scratch(who, a.scratch, IndexRows::scratch_bytes(a.topk_TK.dim(0), e, s));
}

void check(const IndexRoutes& a, const Stream& s) {
  constexpr const char* who = "index_routes";
  const int64_t e = sorted_experts(who, a.offsets_e1);
  MOEBIUS_CHECK(usage, a.pair_row_NL.shape.rank() == 2, "{}: pair_row must be i32 [N, L]; got {}", who,
                to_string(a.pair_row_NL));
  const int64_t N = a.pair_row_NL.dim(0), L = a.pair_row_NL.dim(1);
  check_tensor(who, "pair_row", a.pair_row_NL, DType::i32, {N, L});
  check_tensor(who, "weight", a.weight_NL, DType::f32, {N, L});
  check_tensor(who, "routes", a.routes_N2L, DType::i32, {N, 2 * L});
  const Shape& arrive = a.arrive_GV.shape;
  MOEBIUS_CHECK(usage, arrive.rank() == 2 && arrive[0] >= 1 && arrive[1] >= 1 && N % arrive[0] == 0,
                "{}: arrive must be i32 [G, V] where G divides the {} tokens; got {}", who, N, to_string(a.arrive_GV));
  check_tensor(who, "arrive", a.arrive_GV, DType::i32, arrive);
  check_row_token(who, a.row_token_R, N * std::min(L, e));
  check_scratch(who, a.scratch, IndexRows::scratch_bytes(N, e, s));
}

void check(const IndexArrivals& a) {
  constexpr const char* who = "index_arrivals";
  const int64_t e = num_experts(who, a.offsets_e1);
  MOEBIUS_CHECK(usage, a.counts_WE.shape.rank() == 2 && a.first_expert >= 0 && a.first_expert + e <= a.counts_WE.dim(1),
                "{}: counts must be i32 [W, E] with the experts {} to {} in E; got {}", who, a.first_expert,
                a.first_expert + e, to_string(a.counts_WE));
  check_tensor(who, "counts", a.counts_WE, DType::i32, a.counts_WE.shape);
  check_tensor(who, "arrival", a.arrival_R, DType::i32, {a.arrival_R.numel()});
  check_tensor(who, "row", a.row_R, DType::i32, a.arrival_R.shape);
}

}  // namespace

int64_t IndexRows::scratch_bytes(int64_t num_tokens, int64_t num_experts, const Stream& s) {
  if (s.target() == DeviceKind::cuda) return cuda::index_rows_scratch_bytes(num_tokens, num_experts);
  return cpu::index_rows_scratch_bytes(num_tokens, num_experts);
}

void index_rows(Stream& s, const IndexRows& a) {
  check(a, s);
  OpScope scope(s, "index_rows",
                {0, 3 * bytes_of(a.topk_TK) + bytes_of(a.kept_TK) + bytes_of(a.row_token_R) + bytes_of(a.row_pair_R)});
  run_on_device(s, cpu::index_rows, cuda::index_rows, a);
}

void index_routes(Stream& s, const IndexRoutes& a) {
  check(a, s);
  OpScope scope(s, "index_routes",
                {0, 2 * bytes_of(a.routes_N2L) + 2 * bytes_of(a.pair_row_NL) + bytes_of(a.row_token_R)});
  run_on_device(s, cpu::index_routes, cuda::index_routes, a);
}

void index_arrivals(Stream& s, const IndexArrivals& a) {
  check(a);
  OpScope scope(s, "index_arrivals", {0, 2 * bytes_of(a.arrival_R) + bytes_of(a.counts_WE)});
  run_on_device(s, cpu::index_arrivals, cuda::index_arrivals, a);
}

}  // namespace moebius

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

void check(const IndexRows& a, const Stream& s) {
  constexpr const char* who = "index_rows";
  const int64_t e = num_experts(who, a.offsets_e1);
  MOEBIUS_CHECK(usage, e <= kMaxExperts, "{}: at most {} experts; got {}", who, kMaxExperts, e);
  MOEBIUS_CHECK(usage, a.topk_TK.shape.rank() == 2, "{}: topk must be i32 [T, K]; got {}", who, to_string(a.topk_TK));
  check_tensor(who, "topk", a.topk_TK, DType::i32, a.topk_TK.shape);
  check_tensor(who, "pair_row", a.pair_row_TK, DType::i32, a.topk_TK.shape);
  if (!a.kept_TK.empty()) check_tensor(who, "kept", a.kept_TK, DType::i32, a.topk_TK.shape);
  if (!a.counts_e.empty()) check_tensor(who, "counts", a.counts_e, DType::i32, {e});
  const int64_t most = a.topk_TK.dim(0) * std::min(a.topk_TK.dim(1), e);
  MOEBIUS_CHECK(usage, a.row_token_R.numel() >= most, "{}: row_token must have at least {} rows; got {}", who, most,
                to_string(a.row_token_R));
  check_tensor(who, "row_token", a.row_token_R, DType::i32, {a.row_token_R.numel()});
  if (!a.row_pair_R.empty()) check_tensor(who, "row_pair", a.row_pair_R, DType::i32, a.row_token_R.shape);
  check_scratch(who, a.scratch, IndexRows::scratch_bytes(a.topk_TK.dim(0), e, s));
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

void index_arrivals(Stream& s, const IndexArrivals& a) {
  check(a);
  OpScope scope(s, "index_arrivals", {0, 2 * bytes_of(a.arrival_R) + bytes_of(a.counts_WE)});
  run_on_device(s, cpu::index_arrivals, cuda::index_arrivals, a);
}

}  // namespace moebius

#include "ops/low_rank/low_rank_dropout.h"

#include "ops/run_on_device.h"

namespace moebius {

void row_tokens(Stream& s, const RowTokens& a) {
  constexpr const char* who = "row_tokens";
  check_tensor(who, "index", a.index_T, DType::i32, {a.index_T.numel()});
  check_tensor(who, "draw", a.draw_2, DType::i64, {2});
  OpScope scope(s, who, {0, static_cast<double>(a.index_T.num_bytes())});
  if (a.index_T.empty()) return;
  run_on_device(s, cpu::row_tokens, cuda::row_tokens, a);
}

void low_rank_dropout(Stream& s, const LowRankDropout& a) {
  constexpr const char* who = "low_rank_dropout";
  const DType dtype = a.y_RK.dtype;
  MOEBIUS_CHECK(usage, (dtype == DType::f32 || dtype == DType::bf16) && a.y_RK.shape.rank() == 2,
                "{}: y must be an f32 or bf16 matrix; got {}", who, to_string(a.y_RK));
  const int64_t R = a.y_RK.dim(0), K = a.y_RK.dim(1);
  check_tensor(who, "x", a.x_TK, dtype, {a.gather ? a.x_TK.dim(0) : R, K});
  check_tensor(who, "draw", a.draw.draw_2, DType::i64, {2});
  if (!a.rows.token_R.empty()) check_tensor(who, "token", a.rows.token_R, DType::i32, {R});
  MOEBIUS_CHECK(usage, !a.gather || !a.rows.token_R.empty(), "{}: x is gathered, so token must be i32[{}]", who, R);
  check_tensor(who, "index", a.draw.index_N, DType::i32, {a.rows.token_R.empty() ? R : a.draw.index_N.numel()});
  MOEBIUS_CHECK(usage,
                a.draw.rate >= 0 && a.draw.rate < 1 && a.draw.first_column >= 0 &&
                    a.draw.first_column + K <= a.draw.num_columns && a.draw.first_expert < a.draw.num_experts,
                "{}: the rate must be in [0, 1), and the columns [{}, {}) among {}; got the rate {}", who,
                a.draw.first_column, a.draw.first_column + K, a.draw.num_columns, a.draw.rate);
  OpScope scope(s, who, cost(a));
  if (a.y_RK.empty()) return;
  run_on_device(s, cpu::low_rank_dropout, cuda::low_rank_dropout, a);
}

Cost cost(const LowRankDropout& a) {
  const auto elements = static_cast<double>(a.y_RK.numel());
  return {elements, elements * static_cast<double>(size_of(a.y_RK.dtype)) * (a.accumulate ? 3 : 2)};
}

}  // namespace moebius

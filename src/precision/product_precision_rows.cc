// The rows of products of nvfp4: they are rounded in one pass to the values that their quantised copies have.
#include "precision/product_precision.h"

namespace moebius {

ProductPrecision::RowOrder ProductPrecision::order_of(const QuantizeContext& c, const RowGroups& rows) const {
  if (!rows.is_mixed) return {};
  const int64_t M = num_batches(rows), R = rows.source_R.numel();
  const RowOrder order{c.stack.alloc({R}, DType::i32),
                       c.stack.alloc({(rows.offsets_e1.numel() - 1) * M + 1}, DType::i32)};
  nv_order(c.stream, {.order_R = order.order_R,
                      .offsets_of_batches = order.offsets_of_batches,
                      .offsets_e1 = rows.offsets_e1,
                      .index_N = rows.index_N,
                      .source_R = rows.source_R,
                      .num_batches = M,
                      .batch_tokens = places_.batch_tokens});
  return order;
}

NvRows ProductPrecision::nv_rows(const Tensor& x, const RowGroups& rows, bool of_dw, const RowOrder& order) const {
  return {.x_NC = x,
          .token_R = of_dw ? rows.token_R : Tensor{},
          .offsets_g1 = order.order_R.empty() ? rows.offsets_e1 : order.offsets_of_batches,
          .order_R = order.order_R,
          .index_N = rows.index_N,
          .source_R = rows.source_R,
          .hadamard = of_dw,
          .num_batches = num_batches(rows),
          .batch_tokens = places_.batch_tokens};
}

void ProductPrecision::measure_rows(const QuantizeContext& c, const Tensor& own_M, const Tensor& x,
                                    const RowGroups& rows, bool of_dw, const RowOrder& order) const {
  NvRows of = nv_rows(x, rows, of_dw, order);
  if (!rows.measured.empty() && !of_dw)
    of = {.x_NC = rows.measured, .num_batches = of.num_batches, .batch_tokens = places_.batch_tokens};
  nv_magnitudes(c.stream, {.bits_M = own_M, .of = of, .draw_2 = c.draw_2});
}

void ProductPrecision::round_rows(const QuantizeContext& c, const Tensor& y_RC, const Tensor& x, const RowGroups& rows,
                                  const Rounding& how, const RowOrder& order, Magnitudes known) const {
  const NvDraws draws{.draw_2 = c.draw_2,
                      .seed = seed_,
                      .key = key_,
                      .first_expert = rows.offsets_e1.empty() ? 0 : experts_.first,
                      .num_experts = experts_.all,
                      .groups_per_expert = order.order_R.empty() ? 1 : num_batches(rows),
                      .columns = how.draws ? places_.dy_columns : WholeColumns{}};
  nv_round(c.stream, {.y_RC = y_RC,
                      .of = nv_rows(x, rows, how.transposed, order),
                      .magnitude_WB = known.all_WB,
                      .first_batch = known.first,
                      .draws = draws,
                      .draws_elements = how.draws,
                      .stats_5 = rows.counts_measured ? Tensor{} : how.sums_5});
}

Tensor ProductPrecision::rounded(const QuantizeContext& c, const Tensor& x, const RowGroups& rows,
                                 const Rounding& how) const {
  const bool of_dw = how.transposed;
  const int64_t R = rows.token_R.empty() || !of_dw ? x.dim(0) : rows.token_R.numel(), M = num_batches(rows);
  const Tensor y_RC = c.stack.alloc({R, x.dim(1)}, x.dtype);
  StackScope scope(c.stack);
  const RowOrder order = of_dw ? order_of(c, rows) : RowOrder{};
  const Tensor own_M = c.stack.alloc({M}, DType::i32);
  measure_rows(c, own_M, x, rows, of_dw, order);
  const Magnitudes known{ranks_.rows ? exchange(c, *ranks_.rows, own_M) : own_M.view({1, M}), 0};
  round_rows(c, y_RC, x, rows, how, order, known);
  if (!rows.counts_measured || how.sums_5.empty()) return y_RC;
  const RowGroups measured{.index_N = rows.measured_index_T};
  round_rows(c, c.stack.alloc(rows.measured.shape, x.dtype), rows.measured, measured, how, {}, known);
  return y_RC;
}

std::pair<Operand, Operand> ProductPrecision::rounded_for_dw(const QuantizeContext& c, const Tensor& dy_TC,
                                                             const RowGroups& dy_rows, const Tensor& x_TC,
                                                             const RowGroups& x_rows) const {
  const auto allocate = [&](const Tensor& x, const RowGroups& rows) {
    return c.stack.alloc({rows.token_R.empty() ? x.dim(0) : rows.token_R.numel(), x.dim(1)}, x.dtype);
  };
  const Tensor dy_RC = allocate(dy_TC, dy_rows), x_RC = allocate(x_TC, x_rows);
  StackScope scope(c.stack);
  const RowOrder order = order_of(c, dy_rows);
  const int64_t M = num_batches(dy_rows);
  const Tensor own_2M = c.stack.alloc({2 * M}, DType::i32);
  measure_rows(c, own_2M.rows(0, M), dy_TC, dy_rows, true, order);
  measure_rows(c, own_2M.rows(M, 2 * M), x_TC, x_rows, true, order);
  const Tensor all_WB = ranks_.rows ? exchange(c, *ranks_.rows, own_2M) : own_2M.view({1, 2 * M});
  round_rows(c, dy_RC, dy_TC, dy_rows, of_dy_for_dw(c), order, {all_WB, 0});
  round_rows(c, x_RC, x_TC, x_rows, of_x_for_dw(c), order, {all_WB, M});
  return {dy_RC, x_RC};
}

}  // namespace moebius

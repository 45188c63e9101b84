#include "model/lora/adapter.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// Runs an op with scratch from the step stack for the duration of the call.
template <class Op, class Run>
void run_op(Step& step, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  run(step.stream, op);
}

Rows without_token(const Rows& rows) { return {.offsets_e1 = rows.offsets_e1}; }

}  // namespace

Adapter::Adapter(const LayerContext& c, const ParamSpec& w) {
  AdapterParams params = adapter_params(c.lora, w);
  if (params.blocks.empty()) return;
  rank_ = c.lora.rank;
  out_ = w.shape[w.shape.rank() - 2];
  scale_ = c.lora.scale();
  blocks_ = std::move(params.blocks);
  dropout_ = AdapterDropout(c, w, blocks_);
  a_ = &c.params.declare(std::move(params.a));
  b_ = &c.params.declare(std::move(params.b));
}

std::vector<Adapter::Window> Adapter::windows(int64_t first, int64_t count) const {
  std::vector<Window> all;
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    const AdapterBlock& block = blocks_[b];
    const int64_t begin = std::max(block.column, first), end = std::min(block.column + block.count, first + count);
    if (begin >= end) continue;
    all.push_back({.y = {begin - first, end - begin}, .low = low_of(b), .row = block.row + begin - block.column});
  }
  return all;
}

Tensor Adapter::alloc_low(Step& step, const Tensor& like, int64_t num_rows) const {
  return step.alloc({num_rows, low_columns()}, like.dtype);
}

Adapter::Tokens Adapter::tokens_of(Step& step, const Tokens& given, int64_t num_rows) const {
  if (!given.index_N.empty() || !dropout_.is_on(step)) return given;
  return {.index_N = dropout_.token_index(step, num_rows)};
}

Tensor Adapter::dropped(Step& step, int64_t block, const Tensor& x, int64_t R, const Rows& rows,
                        const Tokens& tokens) const {
  const Tensor to = step.alloc({R, x.dim(1)}, x.dtype);
  const bool gather = !rows.token_R.empty();
  dropout_.apply(step, {.y = to,
                        .x = x,
                        .block = block,
                        .index = tokens.index_N,
                        .rows = {rows.offsets_e1, tokens.row_R},
                        .gather = gather});
  return to;
}

void Adapter::down(Step& step, const Tensor& low, const Tensor& x, const Rows& rows, const Tokens& given) const {
  if (!dropout_.is_on(step)) {
    run_op(step,
           LowRankProduct{.y_RM = low,
                          .x_TK = x,
                          .w_ePQ = a_->w,
                          .y = {0, low.dim(1)},
                          .x = {0, x.dim(1)},
                          .scale = scale_of(step),
                          .rows = rows},
           low_rank_product);
    return;
  }
  StackScope scope(step.stack);
  const Tokens tokens = tokens_of(step, given, low.dim(0));
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    StackScope of_block(step.stack);
    const Tensor own = dropped(step, b, x, low.dim(0), rows, tokens);
    run_op(step,
           LowRankProduct{.y_RM = low,
                          .x_TK = own,
                          .w_ePQ = a_->w,
                          .y = low_of(b),
                          .x = {0, x.dim(1)},
                          .w_first = b * rank_,
                          .scale = scale_of(step),
                          .rows = without_token(rows)},
           low_rank_product);
  }
}

void Adapter::up_bwd(Step& step, const Tensor& dlow, const Tensor& dy, const Rows& rows, int64_t first) const {
  const std::vector<Window> all = windows(first, dy.dim(1));
  if (all.size() < blocks_.size()) fill_zero(step.stream, dlow);
  for (const Window& window : all) {
    run_op(step,
           LowRankProduct{.y_RM = dlow,
                          .x_TK = dy,
                          .w_ePQ = b_->w,
                          .y = window.low,
                          .x = window.y,
                          .w_first = window.row,
                          .transposed = true,
                          .scale = scale_of(step),
                          .rows = rows},
           low_rank_product);
  }
}

void Adapter::forward(Step& step, const Forward& in) const {
  if (is_empty()) return;
  StackScope scope(step.stack);
  const Tensor low = in.low.empty() ? alloc_low(step, in.y, in.y.dim(0)) : in.low;
  down(step, low, in.x, in.rows, in.tokens);
  for (const Window& window : windows(in.first, in.y.dim(1))) {
    run_op(step,
           LowRankProduct{.y_RM = in.y,
                          .x_TK = low,
                          .w_ePQ = b_->w,
                          .y = window.y,
                          .x = window.low,
                          .w_first = window.row,
                          .accumulate = true,
                          .rows = without_token(in.rows)},
           low_rank_product);
  }
}

LowRankTerm Adapter::forward_term(Step& step, Tensor low) const {
  if (is_empty()) return {};
  const bool is_whole = blocks_.size() == 1 && blocks_[0].count == out_;
  const Tensor w = is_whole ? b_->w : step.alloc({b_->w.dim(0), out_, low_columns()}, b_->w.dtype);
  if (dropout_.is_on(step)) return {};  // evaluation needs no more memory than was planned for training
  return {.low_RL = low, .w = w};
}

LowRankTerm Adapter::backward_term(Step& step, Tensor dlow) const {
  if (is_empty() || dropout_.is_on(step)) return {};
  return {.low_RL = dlow, .w = a_->w};
}

void Adapter::compute(Step& step, const LowRankTerm& term, const Forward& in) const {
  down(step, term.low_RL, in.x, in.rows, in.tokens);
  if (term.w.data == b_->w.data) return;
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    low_rank_block(step.stream, {.to_eML = term.w,
                                 .from_ePQ = b_->w,
                                 .columns = low_of(b),
                                 .first = blocks_[b].column,
                                 .count = blocks_[b].count,
                                 .row = blocks_[b].row});
  }
}

void Adapter::compute(Step& step, const LowRankTerm& term, const Input& in) const {
  up_bwd(step, term.low_RL, in.dy, in.rows, in.first);
}

void Adapter::backward_input(Step& step, const Input& in) const {
  if (is_empty()) return;
  StackScope scope(step.stack);
  const Tensor dlow = in.dlow.empty() ? alloc_low(step, in.dx, in.dx.dim(0)) : in.dlow;
  up_bwd(step, dlow, in.dy, in.rows, in.first);
  const Rows rows = without_token(in.rows);
  LowRankProduct product{.y_RM = in.dx,
                         .x_TK = dlow,
                         .w_ePQ = a_->w,
                         .y = {0, in.dx.dim(1)},
                         .x = {0, dlow.dim(1)},
                         .transposed = true,
                         .accumulate = in.accumulate,
                         .rows = rows};
  if (!dropout_.is_on(step)) return run_op(step, product, low_rank_product);
  const Tokens tokens = tokens_of(step, in.tokens, in.dx.dim(0));
  product.y_RM = step.alloc(in.dx.shape, in.dx.dtype);
  product.accumulate = false;
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    product.x = low_of(b);
    product.w_first = b * rank_;
    run_op(step, product, low_rank_product);
    dropout_.apply(step, {.y = in.dx,
                          .x = product.y_RM,
                          .block = b,
                          .index = tokens.index_N,
                          .rows = {in.rows.offsets_e1, tokens.row_R},
                          .accumulate = in.accumulate || b > 0});
  }
}

void Adapter::wgrad_a(Step& step, const Tensor& dlow, const Tensor& x, const Rows& rows, const Tokens& given) const {
  LowRankWgrad wgrad{.dw_ePQ = a_->dw,
                     .left_RM = dlow,
                     .right_RN = x,
                     .left = {0, dlow.dim(1)},
                     .right = {0, x.dim(1)},
                     .gather_right = !rows.token_R.empty(),
                     .rows = rows};
  if (!dropout_.is_on(step)) return run_op(step, wgrad, low_rank_wgrad);
  StackScope scope(step.stack);
  const Tokens tokens = tokens_of(step, given, dlow.dim(0));
  wgrad.gather_right = false;
  wgrad.rows = without_token(rows);
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    StackScope of_block(step.stack);
    wgrad.right_RN = dropped(step, b, x, dlow.dim(0), rows, tokens);
    wgrad.left = low_of(b);
    wgrad.w_first = b * rank_;
    run_op(step, wgrad, low_rank_wgrad);
  }
}

void Adapter::backward_weight(Step& step, const Weight& in) const {
  if (is_empty() || !a_->has_grad) return;
  StackScope scope(step.stack);
  const bool has_token = !in.rows.token_R.empty(), gather_dy = has_token && in.gather_dy,
             gather_x = has_token && in.gather_x;
  const Rows plain = without_token(in.rows), of_dy = gather_dy ? in.rows : plain, of_x = gather_x ? in.rows : plain;
  const int64_t R = in.gather_dy ? in.x.dim(0) : in.dy.dim(0);
  Tensor low = in.low, dlow = in.dlow;
  if (low.empty()) {
    low = alloc_low(step, in.x, R);
    down(step, low, in.x, of_x, in.tokens);
  }
  if (dlow.empty()) {
    dlow = alloc_low(step, in.dy, R);
    up_bwd(step, dlow, in.dy, of_dy, in.first);
  }
  for (const Window& window : windows(in.first, in.dy.dim(1))) {
    run_op(step,
           LowRankWgrad{.dw_ePQ = b_->dw,
                        .left_RM = in.dy,
                        .right_RN = low,
                        .left = window.y,
                        .right = window.low,
                        .w_first = window.row,
                        .gather_left = gather_dy,
                        .rows = of_dy},
           low_rank_wgrad);
  }
  wgrad_a(step, dlow, in.x, of_x, in.tokens);
}

}  // namespace moebius

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
  scale_ = c.lora.scale();
  blocks_ = std::move(params.blocks);
  a_ = &c.params.declare(std::move(params.a));
  b_ = &c.params.declare(std::move(params.b));
}

std::vector<Adapter::Window> Adapter::windows(int64_t first, int64_t count) const {
  std::vector<Window> all;
  for (int64_t b = 0; b < std::ssize(blocks_); ++b) {
    const AdapterBlock& block = blocks_[b];
    const int64_t begin = std::max(block.column, first), end = std::min(block.column + block.count, first + count);
    if (begin >= end) continue;
    all.push_back(
        {.y = {begin - first, end - begin}, .low = {b * rank_, rank_}, .row = block.row + begin - block.column});
  }
  return all;
}

Tensor Adapter::alloc_low(Step& step, const Tensor& like, int64_t num_rows) const {
  return step.alloc({num_rows, low_columns()}, like.dtype);
}

void Adapter::down(Step& step, const Tensor& low, const Tensor& x, const Rows& rows) const {
  run_op(step,
         LowRankProduct{.y_RM = low, .x_TK = x, .w_ePQ = a_->w, .y = {0, low.dim(1)}, .x = {0, x.dim(1)}, .rows = rows},
         low_rank_product);
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
                          .scale = scale_,
                          .rows = rows},
           low_rank_product);
  }
}

void Adapter::forward(Step& step, Tensor y, Tensor x, const Rows& rows, int64_t first, Tensor low) const {
  if (is_empty()) return;
  StackScope scope(step.stack);
  if (low.empty()) low = alloc_low(step, y, y.dim(0));
  down(step, low, x, rows);
  for (const Window& window : windows(first, y.dim(1))) {
    run_op(step,
           LowRankProduct{.y_RM = y,
                          .x_TK = low,
                          .w_ePQ = b_->w,
                          .y = window.y,
                          .x = window.low,
                          .w_first = window.row,
                          .accumulate = true,
                          .scale = scale_,
                          .rows = without_token(rows)},
           low_rank_product);
  }
}

void Adapter::backward_input(Step& step, const Input& in) const {
  if (is_empty()) return;
  StackScope scope(step.stack);
  const Tensor dlow = in.dlow.empty() ? alloc_low(step, in.dx, in.dx.dim(0)) : in.dlow;
  up_bwd(step, dlow, in.dy, in.rows, in.first);
  run_op(step,
         LowRankProduct{.y_RM = in.dx,
                        .x_TK = dlow,
                        .w_ePQ = a_->w,
                        .y = {0, in.dx.dim(1)},
                        .x = {0, dlow.dim(1)},
                        .transposed = true,
                        .accumulate = in.accumulate,
                        .rows = without_token(in.rows)},
         low_rank_product);
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
    down(step, low, in.x, of_x);
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
                        .scale = scale_,
                        .gather_left = gather_dy,
                        .rows = of_dy},
           low_rank_wgrad);
  }
  run_op(step,
         LowRankWgrad{.dw_ePQ = a_->dw,
                      .left_RM = dlow,
                      .right_RN = in.x,
                      .left = {0, dlow.dim(1)},
                      .right = {0, in.x.dim(1)},
                      .gather_right = gather_x,
                      .rows = of_x},
         low_rank_wgrad);
}

}  // namespace moebius

#include "model/lora/router_adapter.h"

#include "model/lora/adapter_params.h"
#include "ops/elementwise/elementwise.h"
#include "ops/low_rank/low_rank.h"
#include "ops/routing/routing.h"

namespace moebius {

RouterAdapter::RouterAdapter(const LayerContext& c, const ParamSpec& gate) {
  AdapterParams params = adapter_params(c.lora, gate);
  if (params.blocks.empty()) return;
  rank_ = c.lora.rank;
  scale_ = c.lora.scale();
  dropout_ = AdapterDropout(c, gate, params.blocks);
  params.b.dtype = DType::f32;  // as logits are
  a_ = &c.params.declare(std::move(params.a));
  b_ = &c.params.declare(std::move(params.b));
}

Tensor RouterAdapter::token_index(Step& step, int64_t T) const {
  return dropout_.is_on(step) ? dropout_.token_index(step, T) : Tensor{};
}

Tensor RouterAdapter::dropped(Step& step, Tensor x_TD, const Tensor& index_T) const {
  if (!dropout_.is_on(step)) return x_TD;
  const Tensor to_TD = step.alloc(x_TD.shape, x_TD.dtype);
  dropout_.apply(step, {.y = to_TD, .x = x_TD, .index = index_T});
  return to_TD;
}

Tensor RouterAdapter::down(Step& step, Tensor x_TD) const {
  const Tensor low_Tr = step.alloc({x_TD.dim(0), rank_}, DType::f32);
  StackScope scope(step.stack);
  RouterLogitsFwd product{.logits_TE = low_Tr, .x_TD = x_TD, .w_ED = a_->w};
  product.scratch = step.alloc_bytes(RouterLogitsFwd::scratch_bytes(product, step.stream));
  router_logits_fwd(step.stream, product);
  return low_Tr;
}

void RouterAdapter::forward(Step& step, Tensor logits_TE, Tensor x_TD) const {
  if (!a_) return;
  StackScope scope(step.stack);
  LowRankProduct up{.y_RM = logits_TE,
                    .x_TK = down(step, dropped(step, x_TD, token_index(step, x_TD.dim(0)))),
                    .w_ePQ = b_->w,
                    .y = {0, logits_TE.dim(1)},
                    .x = {0, rank_},
                    .accumulate = true,
                    .scale = scale_of(step)};
  up.scratch = step.alloc_bytes(LowRankProduct::scratch_bytes(up, step.stream));
  low_rank_product(step.stream, up);
}

void RouterAdapter::backward(Step& step, Tensor dx_TD, Tensor dlogits_TE, Tensor x_TD) const {
  if (!a_) return;
  StackScope scope(step.stack);
  const int64_t T = x_TD.dim(0), E = dlogits_TE.dim(1);
  const Tensor index_T = token_index(step, T), own_TD = dropped(step, x_TD, index_T);
  const Tensor low_Tr = down(step, own_TD), dlow_Tr = step.alloc({T, rank_}, DType::f32);
  LowRankProduct up_bwd{.y_RM = dlow_Tr,
                        .x_TK = dlogits_TE,
                        .w_ePQ = b_->w,
                        .y = {0, rank_},
                        .x = {0, E},
                        .transposed = true,
                        .scale = scale_of(step)};
  up_bwd.scratch = step.alloc_bytes(LowRankProduct::scratch_bytes(up_bwd, step.stream));
  low_rank_product(step.stream, up_bwd);
  LowRankWgrad db{.dw_ePQ = b_->dw,
                  .left_RM = dlogits_TE,
                  .right_RN = low_Tr,
                  .left = {0, E},
                  .right = {0, rank_},
                  .scale = scale_of(step)};
  db.scratch = step.alloc_bytes(LowRankWgrad::scratch_bytes(db, step.stream));
  low_rank_wgrad(step.stream, db);
  Tensor down_TD = dx_TD;
  if (dropout_.is_on(step)) {
    down_TD = step.alloc(dx_TD.shape, dx_TD.dtype);
    fill_zero(step.stream, down_TD);
  }
  RouterLogitsBwd down_bwd{.dx_TD = down_TD, .dw_ED = a_->dw, .dlogits_TE = dlow_Tr, .x_TD = own_TD, .w_ED = a_->w};
  down_bwd.partial_PED =
      step.alloc({RouterLogitsBwd::num_partials(down_bwd, step.stream), rank_, x_TD.dim(1)}, DType::f32);
  down_bwd.scratch = step.alloc_bytes(RouterLogitsBwd::scratch_bytes(down_bwd, step.stream));
  router_logits_bwd(step.stream, down_bwd);
  if (dropout_.is_on(step)) dropout_.apply(step, {.y = dx_TD, .x = down_TD, .index = index_T, .accumulate = true});
}

}  // namespace moebius

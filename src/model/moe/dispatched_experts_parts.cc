// DispatchedExperts with parallel.expert_overlap = "batch_split": some rows are computed while others are exchanged.
#include "model/moe/dispatched_experts.h"

namespace moebius {
namespace {

using Parts = SplitDispatcher::Parts;

// Sends the parts of other ranks one after another. This rank's own rows are computed while the first part is sent,
// and each part while the next one is. The caller computes the last part. send(of, is_last) sends the rows at the
// distances `of`. With own_too the first call also copies this rank's own rows.
template <class Send, class Compute>
void send_beside_products(Step& step, const Parts& parts, bool own_too, int multiprocessors, const Send& send,
                          const Compute& compute) {
  const SplitDispatcher::Part* here = &parts.own;
  for (const SplitDispatcher::Part& next : parts.others) {
    const bool is_first = &next == &parts.others.front(), is_last = &next == &parts.others.back();
    const RowDistances of{.first = is_first && own_too ? 0 : next.of.first, .end = next.of.end};
    SideWork sending(
        step, true, [&] { send(of, is_last); }, multiprocessors);
    compute(*here);
    sending.join();
    here = &next;
  }
}

}  // namespace

// Each part of the rows arrives while products of the part before it run, and the first one while a product of this
// rank's own rows runs. The results of the near rows are returned while the first product of the far rows runs. Those
// of the far rows are returned while the second product of the own rows runs.
void DispatchedExperts::forward_in_parts(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved,
                                         const ConcurrentWork& concurrent) const {
  StackScope scope(step.stack);
  const int64_t T = x_TD.dim(0), R = dispatcher_->max_rows(T);
  DispatchHandle& handle = *saved.handle;
  const Parts parts = split_->parts(step, T, handle);
  const Dispatched own{.source = x_TD, .rows = parts.own_rows, .weight_R = {}};
  Dispatched others{.source = {}, .rows = parts.rows, .weight_R = {}};
  open_h(step, saved);
  const Tensor a_RF = activations(step, R), y_RD = outputs(step, R);
  send_beside_products(
      step, parts, /*own_too=*/false, sending_multiprocessors(step, saved),
      [&](const RowDistances& of, bool) { others.source = split_->dispatch_part(step, x_TD, of, handle).source; },
      [&](const SplitDispatcher::Part& part) {
        if (&part == &parts.own) {
          if (concurrent) concurrent();
          return up(step, a_RF, own, saved, part.rows);
        }
        up(step, a_RF, others, saved, part.rows);
        down(step, y_RD, a_RF, others, saved, part.rows);
      });
  const SplitDispatcher::Part& last = parts.others.back();
  {
    const RowDistances near{.first = parts.own.of.end, .end = last.of.first};
    const bool has_near = parts.others.size() > 1;
    SideWork returning(step, has_near, [&] {
      if (has_near) split_->return_part(step, y_RD, T, near, handle);
    });
    up(step, a_RF, others, saved, last.rows);
    returning.join();
  }
  save_h(step, R, parts.rows.offsets_e1, saved);
  down(step, y_RD, a_RF, others, saved, last.rows);
  SideWork returning(step, true, [&] { split_->return_part(step, y_RD, T, last.of, handle); });
  down(step, y_RD, a_RF, own, saved, parts.own.rows);
  returning.use_whole_gpu();
  split_->return_part(step, y_RD, T, parts.own.of, handle);
  returning.join();
  split_->sum_returned(step, y_TD, handle);
}

// The gradients of weights read the rows of all ranks from one source, so this rank's own are copied there too.
Dispatched DispatchedExperts::receive_grads_in_parts(Step& step, Tensor dweight_R, const Parts& parts, Saved& saved,
                                                     const ConcurrentWork& concurrent) const {
  const Tensor weight_R = split_->row_weights(step, saved.dy_TD.dim(0), *saved.handle);
  Dispatched grads;
  send_beside_products(
      step, parts, /*own_too=*/true, sending_multiprocessors(step, saved),
      [&](const RowDistances& of, bool is_last) {
        grads = split_->combine_bwd_part(step, saved.dy_TD, of, *saved.handle);
        grads.weight_R = weight_R;
        saved.grad_rows = grads.rows;
        if (is_last) grads = hold_grads(step, grads, saved);
      },
      [&](const SplitDispatcher::Part& part) {
        if (&part != &parts.own) return backward_down(step, dweight_R, grads, saved, part.rows);
        if (concurrent) concurrent();
        saved.h_bwd_R2F = saved.h_R2F.for_backward(step, saved.dh_R2F.dim(0), saved.grad_rows.offsets_e1);
        backward_down(step, dweight_R, {saved.dy_TD, parts.own_rows, weight_R}, saved, part.rows);
      });
  return grads;
}

// Computing h also computes the activations, which are not used here.
Dispatched DispatchedExperts::recompute_h_in_parts(Step& step, const Parts& parts, Saved& saved) const {
  Dispatched tokens;
  saved.w1_low.open(step.stack);
  saved.h_R2F.recompute(step.stack, [&] {
    StackScope scope(step.stack);
    const Tensor a_RF = step.alloc(saved.sa_RF.shape, dtype_);
    send_beside_products(
        step, parts, /*own_too=*/true, sending_multiprocessors(step, saved),
        [&](const RowDistances& of, bool) { tokens = split_->dispatch_part(step, saved.x_TD, of, *saved.handle); },
        [&](const SplitDispatcher::Part& part) {
          const bool is_own = &part == &parts.own;
          up(step, a_RF, is_own ? Dispatched{saved.x_TD, parts.own_rows, {}} : tokens, saved, part.rows);
        });
    up(step, a_RF, tokens, saved, parts.others.back().rows);
  });
  return tokens;
}

}  // namespace moebius

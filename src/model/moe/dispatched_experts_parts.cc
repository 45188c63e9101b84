// DispatchedExperts with parallel.expert_overlap = "batch_split": some rows are computed while others are exchanged.
#include "model/moe/dispatched_experts.h"

namespace moebius {

// Each part of the rows arrives while products of the part before it run, the first while those of this rank's own rows
// do. The results of all but the last part leave beside the first product of the last one, and those of the last beside
// the second product of the own rows.
void DispatchedExperts::forward_in_parts(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved,
                                         const ConcurrentWork& concurrent) const {
  StackScope scope(step.stack);
  const int64_t T = x_TD.dim(0), R = dispatcher_->max_rows(T);
  DispatchHandle& handle = *saved.handle;
  const SplitDispatcher::Parts parts = split_->parts(step, T, handle);
  const Dispatched own{.source = x_TD, .rows = parts.own_rows, .weight_R = {}};
  Dispatched others{.source = {}, .rows = parts.rows, .weight_R = {}};
  const size_t last = parts.others.size() - 1;
  const auto& rows_of_last = parts.others[last];
  open_h(step, saved);
  const Tensor a_RF = activations(step, R), y_RD = outputs(step, R);
  for (size_t i = 0; i <= last; ++i) {
    SideWork sending(
        step, true, [&] { others.source = split_->dispatch_part(step, x_TD, parts.others[i].of, handle).source; },
        sending_multiprocessors(step, saved));
    if (i == 0) {
      if (concurrent) concurrent();
      up(step, a_RF, own, saved, parts.own.rows);
    } else {
      up(step, a_RF, others, saved, parts.others[i - 1].rows);
      down(step, y_RD, a_RF, others, saved, parts.others[i - 1].rows);
    }
    sending.join();
  }
  {
    const RowDistances before_last{.first = parts.own.of.end, .end = rows_of_last.of.first};
    SideWork returning(step, last > 0, [&] {
      if (last > 0) split_->return_part(step, y_RD, T, before_last, handle);
    });
    up(step, a_RF, others, saved, rows_of_last.rows);
    returning.join();
  }
  save_h(step, R, parts.rows.offsets_e1, saved);
  down(step, y_RD, a_RF, others, saved, rows_of_last.rows);
  SideWork returning(step, true, [&] { split_->return_part(step, y_RD, T, rows_of_last.of, handle); });
  down(step, y_RD, a_RF, own, saved, parts.own.rows);
  returning.use_whole_gpu();
  split_->return_part(step, y_RD, T, parts.own.of, handle);
  returning.join();
  split_->sum_returned(step, y_TD, handle);
}

// dy of the own rows is sent with the first part: the gradients of weights read all rows from one source.
Dispatched DispatchedExperts::receive_grads_in_parts(Step& step, Tensor dweight_R, const SplitDispatcher::Parts& parts,
                                                     Saved& saved, const ConcurrentWork& concurrent) const {
  const Tensor weight_R = split_->row_weights(step, saved.dy_TD.dim(0), *saved.handle);
  Dispatched here{.source = saved.dy_TD, .rows = parts.own_rows, .weight_R = weight_R}, grads;
  const RowPart* part = &parts.own.rows;
  for (size_t i = 0; i < parts.others.size(); ++i) {
    const RowDistances of{.first = i == 0 ? 0 : parts.others[i].of.first, .end = parts.others[i].of.end};
    SideWork arriving(
        step, true,
        [&] {
          grads = split_->combine_bwd_part(step, saved.dy_TD, of, *saved.handle);
          grads.weight_R = weight_R;
          saved.grad_rows = grads.rows;
          if (i + 1 == parts.others.size()) grads = hold_grads(step, grads, saved);
        },
        sending_multiprocessors(step, saved));
    if (i == 0) {
      if (concurrent) concurrent();
      saved.h_bwd_R2F = saved.h_R2F.for_backward(step, saved.dh_R2F.dim(0), saved.grad_rows.offsets_e1);
    }
    backward_down(step, dweight_R, here, saved, *part);
    arriving.join();
    here = grads;
    part = &parts.others[i].rows;
  }
  return grads;
}

}  // namespace moebius

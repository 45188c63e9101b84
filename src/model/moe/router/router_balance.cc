#include <array>

#include "model/moe/router/router.h"
#include "ops/elementwise/elementwise.h"
#include "ops/elementwise/fill_zeros.h"

namespace moebius {

// Every balance loss is coeff * sum over segments of E/(K ...) prob . count with its own segments and counts, so each
// adds to one table of derivatives w.r.t. the normalised scores.
void Router::balance(Step& step, Saved& saved) const {
  Stream& s = step.stream;
  const Stats batch = alloc_stats(step, 1);
  balance_stats(s, {.prob_SE = batch.prob_SE,
                    .count_SE = batch.count_SE,
                    .z_1 = metrics().z_1,
                    .entropy_1 = metrics().entropy_1,
                    .scratch = step.alloc_bytes(BalanceStats::scratch_bytes(saved.logits_TE.dim(0), E_, 1, s)),
                    .logits_TE = saved.logits_TE,
                    .score = model_.score,
                    .top_k = K_});
  if (saved.dsbar_SE.empty()) return;
  for (const Tensor& sum : {batch.prob_SE, batch.count_SE}) mesh_.group(Axis::tp_cp).all_reduce_sum(s, sum);

  const Tensor dsbar_1E = step.alloc({1, E_}, DType::f32);
  fill_zeros(s, std::array{dsbar_1E, saved.dsbar_SE});
  if (balance_.aux) aux_loss(step, dsbar_1E, batch);
  if (balance_.global_aux) global_aux_loss(step, dsbar_1E, batch);
  if (balance_.seq_aux) seq_aux_loss(step, saved);
  add_row(s, saved.dsbar_SE, dsbar_1E);
}

Router::Stats Router::alloc_stats(Step& step, int64_t num_segments) const {
  const Tensor prob_SE = step.alloc({num_segments, E_}, DType::f32);
  return {prob_SE, step.alloc({num_segments, E_}, DType::f32)};
}

void Router::add_loss(Step& step, Tensor dsbar_SE, const Stats& stats) const {
  balance_loss(step.stream, {.loss_1 = metrics().aux_1,
                             .dsbar_SE = dsbar_SE,
                             .prob_SE = stats.prob_SE,
                             .count_SE = stats.count_SE,
                             .total_tokens_1 = step.batch.total_tokens_1(),
                             .coeff = static_cast<float>(balance_.aux_coeff),
                             .top_k = K_});
}

// Adds the balance loss for the load of the micro-batch.
void Router::aux_loss(Step& step, Tensor dsbar_1E, const Stats& batch) const { add_loss(step, dsbar_1E, batch); }

// Adds the balance loss for the load of the last global batch, and counts the load of this one.
void Router::global_aux_loss(Step& step, Tensor dsbar_1E, const Stats& batch) const {
  add_loss(step, dsbar_1E, {.prob_SE = batch.prob_SE, .count_SE = last_load_->w});
  add(step.stream, step_load_1E_, batch.count_SE);
}

// Adds the balance loss for the load of each sequence or document.
void Router::seq_aux_loss(Step& step, Saved& saved) const {
  Stream& s = step.stream;
  const int64_t S = saved.dsbar_SE.dim(0);
  const Stats stats = alloc_stats(step, S);
  // These sums of z and entropy are not reported, since the sums of the whole micro-batch
  // already were.
  const Tensor z_1 = step.alloc({1}, DType::f64), entropy_1 = step.alloc({1}, DType::f64);
  balance_stats(s, {.prob_SE = stats.prob_SE,
                    .count_SE = stats.count_SE,
                    .z_1 = z_1,
                    .entropy_1 = entropy_1,
                    .scratch = step.alloc_bytes(BalanceStats::scratch_bytes(saved.logits_TE.dim(0), E_, S, s)),
                    .logits_TE = saved.logits_TE,
                    .segment_T = segments(step),
                    .score = model_.score,
                    .top_k = K_});
  for (const Tensor& sum : {stats.prob_SE, stats.count_SE}) mesh_.group(Axis::tp_cp).all_reduce_sum(s, sum);
  add_loss(step, saved.dsbar_SE, stats);
}

// Returns the segments of this rank's rows. A batch has the segments of all tokens of a context rank.
Tensor Router::segments(Step& step) const {
  const int64_t T = rows_between_projections(shape_, mesh_.shape()), first = mesh_.place().tp * T;
  return step.batch.segment_T.rows(first, first + T);
}

}  // namespace moebius

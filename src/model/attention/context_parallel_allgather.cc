#include "model/attention/context_parallel_ways.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

Tensor take_all(Step& step, const Tensor& x_TGd, int64_t num_ranks) {
  return step.alloc({num_ranks * x_TGd.dim(0), x_TGd.dim(1), x_TGd.dim(2)}, x_TGd.dtype);
}

// A piece of queries sees keys of its own and all earlier pieces. A later piece
// of a sequence sees all that an earlier one does.
Tensor starts_of(const Step& step, const Pieces& pieces, int64_t rows, int64_t b, int half) {
  const Tensor starts_T = step.batch.attention_starts(rows);
  return starts_T.empty() ? Tensor{} : pieces.here(starts_T, b, half);
}

}  // namespace

Tensor AllGatherContextParallel::gather(Step& step, Tensor x_TGd) const {
  const Tensor sequences_UGd = take_all(step, x_TGd, cp_.size());
  StackScope scope(step.stack);
  const Tensor ranks_UGd = take_all(step, x_TGd, cp_.size());
  cp_.all_gather(step.stream, ranks_UGd, x_TGd);
  to_sequences(step, Pieces::of(cp_, step, x_TGd.dim(0)), sequences_UGd, ranks_UGd);
  return sequences_UGd;
}

void AllGatherContextParallel::sum(Step& step, Tensor dx_TGd, Tensor dx_UGd) const {
  StackScope scope(step.stack);
  const Tensor ranks_UGd = take_all(step, dx_TGd, cp_.size());
  to_ranks(step, Pieces::of(cp_, step, dx_TGd.dim(0)), ranks_UGd, dx_UGd);
  cp_.reduce_scatter_sum(step.stream, dx_TGd, ranks_UGd);
}

void AllGatherContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const int64_t T = o_THd.dim(0);
  const Pieces pieces = Pieces::of(cp_, step, T);
  const Tensor k_UGd = gather(step, in.k_TGd), v_UGd = gather(step, in.v_TGd);
  for (int64_t b = 0; b < pieces.batch; ++b) {
    for (const int half : {0, 1}) {
      const int64_t piece = pieces.on_rank(cp_.rank(), half), seen = piece + 1;
      run_attention(step, AttentionFwd{.o_THd = pieces.here(o_THd, b, half),
                                       .lse_TH = pieces.here(lse_TH, b, half),
                                       .q_THd = pieces.here(in.q_THd, b, half),
                                       .k_UGd = pieces.first(k_UGd, b, seen),
                                       .v_UGd = pieces.first(v_UGd, b, seen),
                                       .doc_start_T = starts_of(step, pieces, T, b, half),
                                       .window = spec_.window,
                                       .scale = spec_.scale,
                                       .is_part = true,
                                       .q_first = piece * pieces.length});
    }
  }
  add_sinks(step, o_THd, lse_TH, in.sink_H);
}

void AllGatherContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  const auto& [grads, do_THd, o_THd, lse_TH, in] = a;
  StackScope scope(step.stack);
  const int64_t T = o_THd.dim(0);
  const Pieces pieces = Pieces::of(cp_, step, T);
  const Tensor k_UGd = gather(step, in.k_TGd), v_UGd = gather(step, in.v_TGd),
               dk_UGd = take_all(step, in.k_TGd, cp_.size()), dv_UGd = take_all(step, in.v_TGd, cp_.size());
  const auto backward_of = [&](int64_t b, int half, const Tensor& dk, const Tensor& dv) {
    const int64_t piece = pieces.on_rank(cp_.rank(), half);
    run_attention(step, AttentionBwd{.dq_THd = pieces.here(grads.q_THd, b, half),
                                     .dk_TGd = dk,
                                     .dv_TGd = dv,
                                     .do_THd = pieces.here(do_THd, b, half),
                                     .o_THd = pieces.here(o_THd, b, half),
                                     .lse_TH = pieces.here(lse_TH, b, half),
                                     .q_THd = pieces.here(in.q_THd, b, half),
                                     .k_TGd = pieces.first(k_UGd, b, piece + 1),
                                     .v_TGd = pieces.first(v_UGd, b, piece + 1),
                                     .doc_start_T = starts_of(step, pieces, T, b, half),
                                     .window = spec_.window,
                                     .scale = spec_.scale,
                                     .is_part = true,
                                     .q_first = piece * pieces.length});
  };
  fill_zero(step.stream, dk_UGd);
  fill_zero(step.stream, dv_UGd);
  for (int64_t b = 0; b < pieces.batch; ++b) {
    const int64_t early = pieces.on_rank(cp_.rank(), 0) + 1, late = pieces.on_rank(cp_.rank(), 1) + 1;
    backward_of(b, 1, pieces.first(dk_UGd, b, late), pieces.first(dv_UGd, b, late));
    StackScope of_sequence(step.stack);
    const Tensor sum_dk = pieces.first(dk_UGd, b, early), sum_dv = pieces.first(dv_UGd, b, early),
                 dk = step.alloc(sum_dk.shape, sum_dk.dtype), dv = step.alloc(sum_dv.shape, sum_dv.dtype);
    backward_of(b, 0, dk, dv);
    add(step.stream, sum_dk, dk);
    add(step.stream, sum_dv, dv);
  }
  sum(step, grads.k_TGd, dk_UGd);
  sum(step, grads.v_TGd, dv_UGd);
  add_sinks_bwd(step, grads.sink_H, {.do_THd = do_THd, .o_THd = o_THd, .lse_TH = lse_TH}, in.sink_H);
}

}  // namespace moebius

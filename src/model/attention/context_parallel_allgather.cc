#include "model/attention/context_parallel_impl.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// A piece of queries sees keys of its own and all earlier pieces. A later piece
// of a sequence sees all that an earlier one does.
Tensor starts_of(const Pieces& pieces, const Tensor& starts_T, int64_t b, int half) {
  return starts_T.empty() ? Tensor{} : pieces.here(starts_T, b, half);
}

}  // namespace

void AllGatherContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const int64_t T = o_THd.dim(0);
  const Pieces pieces = Pieces::of(cp_, step, T);
  const Kv all = expanded(step, spec_, {gather_sequences(step, cp_, in.k_TGd), gather_sequences(step, cp_, in.v_TGd)});
  for (int64_t b = 0; b < pieces.batch; ++b) {
    for (const int half : {0, 1}) {
      const int64_t piece = pieces.on_rank(cp_.rank(), half), seen = piece + 1;
      run_attention(step, AttentionFwd{.o_THd = pieces.here(o_THd, b, half),
                                       .lse_TH = pieces.here(lse_TH, b, half),
                                       .q_THd = pieces.here(in.q_THd, b, half),
                                       .k_UGd = pieces.first(all.k_TGd, b, seen),
                                       .v_UGd = pieces.first(all.v_TGd, b, seen),
                                       .doc_start_T = starts_of(pieces, in.doc_start_T, b, half),
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
  const auto alloc_like = [&](const Tensor& x) { return step.alloc(x.shape, x.dtype); };
  const Kv sent{gather_sequences(step, cp_, in.k_TGd), gather_sequences(step, cp_, in.v_TGd)};
  const Kv all = expanded(step, spec_, sent), dall{alloc_like(all.k_TGd), alloc_like(all.v_TGd)};
  const auto backward_of = [&](int64_t b, int half, const Tensor& dk, const Tensor& dv) {
    const int64_t piece = pieces.on_rank(cp_.rank(), half);
    run_attention(step, AttentionBwd{.dq_THd = pieces.here(grads.q_THd, b, half),
                                     .dk_TGd = dk,
                                     .dv_TGd = dv,
                                     .do_THd = pieces.here(do_THd, b, half),
                                     .o_THd = pieces.here(o_THd, b, half),
                                     .lse_TH = pieces.here(lse_TH, b, half),
                                     .q_THd = pieces.here(in.q_THd, b, half),
                                     .k_TGd = pieces.first(all.k_TGd, b, piece + 1),
                                     .v_TGd = pieces.first(all.v_TGd, b, piece + 1),
                                     .doc_start_T = starts_of(pieces, in.doc_start_T, b, half),
                                     .window = spec_.window,
                                     .scale = spec_.scale,
                                     .is_part = true,
                                     .q_first = piece * pieces.length});
  };
  fill_zero(step.stream, dall.k_TGd);
  fill_zero(step.stream, dall.v_TGd);
  for (int64_t b = 0; b < pieces.batch; ++b) {
    const int64_t early = pieces.on_rank(cp_.rank(), 0) + 1, late = pieces.on_rank(cp_.rank(), 1) + 1;
    backward_of(b, 1, pieces.first(dall.k_TGd, b, late), pieces.first(dall.v_TGd, b, late));
    StackScope of_sequence(step.stack);
    const Tensor sum_dk = pieces.first(dall.k_TGd, b, early), sum_dv = pieces.first(dall.v_TGd, b, early),
                 dk = alloc_like(sum_dk), dv = alloc_like(sum_dv);
    backward_of(b, 0, dk, dv);
    add(step.stream, sum_dk, dk);
    add(step.stream, sum_dv, dv);
  }
  Kv dsent = dall;
  if (spec_.expansion != nullptr) {
    dsent = {alloc_like(sent.k_TGd), alloc_like(sent.v_TGd)};
    spec_.expansion->expand_bwd(step, {.dsent = dsent, .dkv = dall, .sent = sent, .heads = spec_.head_range()});
  }
  sum_of_sequences(step, cp_, grads.k_TGd, dsent.k_TGd);
  sum_of_sequences(step, cp_, grads.v_TGd, dsent.v_TGd);
  add_sinks_bwd(step, grads.sink_H, {.do_THd = do_THd, .o_THd = o_THd, .lse_TH = lse_TH}, in.sink_H);
}

}  // namespace moebius

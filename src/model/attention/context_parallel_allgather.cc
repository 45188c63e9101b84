#include "model/attention/context_parallel_impl.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

Kv alloc_like(Step& step, const Kv& x) {
  return {step.alloc(x.k_TGd.shape, x.k_TGd.dtype), step.alloc(x.v_TGd.shape, x.v_TGd.dtype)};
}

// Returns the keys and values that a piece of queries attends to: of its own and all earlier pieces.
Kv seen_by(const Pieces& pieces, const Kv& all, int64_t b, int64_t piece) {
  return {pieces.first(all.k_TGd, b, piece + 1), pieces.first(all.v_TGd, b, piece + 1)};
}

QueryPositions at_piece(const Pieces& pieces, int64_t piece) {
  return {.is_part = true, .q_first = piece * pieces.length};
}

}  // namespace

void AllGatherContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const Pieces pieces = Pieces::of(cp_, step, o_THd.dim(0));
  const Kv all = expanded(step, spec_, {gather_sequences(step, cp_, in.k_TGd), gather_sequences(step, cp_, in.v_TGd)});
  const QueryRows queries{.q_THd = in.q_THd, .o_THd = o_THd, .lse_TH = lse_TH, .doc_start_T = in.doc_start_T};
  for (int64_t b = 0; b < pieces.batch; ++b) {
    for (const int half : {0, 1}) {
      const int64_t piece = pieces.on_rank(cp_.rank(), half);
      attend(step, spec_, queries.piece(pieces, b, half), seen_by(pieces, all, b, piece), at_piece(pieces, piece));
    }
  }
  add_sinks(step, o_THd, lse_TH, in.sink_H);
}

// The late piece of a sequence attends to all keys of the early piece. So its gradients are written to the gradients of
// all keys, and the early piece's are added.
void AllGatherContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  StackScope scope(step.stack);
  const Pieces pieces = Pieces::of(cp_, step, a.o_THd.dim(0));
  const QueryRows queries = queries_of(a);
  const Kv sent = gather_beside_do(step, cp_, spec_, a);
  const Kv all = expanded(step, spec_, sent), dall = alloc_like(step, all);
  const auto backward_of = [&](int64_t b, int half, const Kv& dseen) {
    const int64_t piece = pieces.on_rank(cp_.rank(), half);
    attend_bwd(step, spec_, dseen, queries.piece(pieces, b, half), seen_by(pieces, all, b, piece),
               at_piece(pieces, piece));
  };
  fill_zero(step.stream, dall.k_TGd);
  fill_zero(step.stream, dall.v_TGd);
  for (int64_t b = 0; b < pieces.batch; ++b) {
    backward_of(b, 1, seen_by(pieces, dall, b, pieces.on_rank(cp_.rank(), 1)));
    StackScope of_sequence(step.stack);
    const Kv sum = seen_by(pieces, dall, b, pieces.on_rank(cp_.rank(), 0)), early = alloc_like(step, sum);
    backward_of(b, 0, early);
    add(step.stream, sum.k_TGd, early.k_TGd);
    add(step.stream, sum.v_TGd, early.v_TGd);
  }
  Kv dsent = dall;
  if (spec_.expansion != nullptr) {
    dsent = alloc_like(step, sent);
    spec_.expansion->expand_bwd(step, {.dsent = dsent, .dkv = dall, .sent = sent, .heads = spec_.head_range()});
  }
  sum_of_sequences(step, cp_, a.grads.k_TGd, dsent.k_TGd);
  sum_of_sequences(step, cp_, a.grads.v_TGd, dsent.v_TGd);
  add_sinks_bwd(step, a.grads.sink_H, queries, a.in.sink_H);
}

}  // namespace moebius

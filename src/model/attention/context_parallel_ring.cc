#include <array>
#include <limits>
#include <utility>

#include "model/attention/context_parallel_impl.h"
#include "ops/attention/attention_merge.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// The two messages of a block.
struct Passing {
  Pending k, v;
  void wait() {
    k.wait();
    v.wait();
  }
};

// Blocks go from rank to rank + 1: after i passes a rank has the block of rank - i.
class Ring {
 public:
  Ring(Group& cp, Step& step) : cp_(cp), step_(step) {}
  int64_t owner(int pass) const { return (cp_.rank() - pass + cp_.size()) % cp_.size(); }
  Passing send(const Kv& block) const {
    const int to = (cp_.rank() + 1) % cp_.size();
    Pending k = cp_.send(step_.stream, block.k_TGd, to);
    return {std::move(k), cp_.send(step_.stream, block.v_TGd, to)};
  }
  Passing recv(const Kv& block) const {
    const int from = static_cast<int>(owner(1));
    Pending k = cp_.recv(step_.stream, block.k_TGd, from);
    return {std::move(k), cp_.recv(step_.stream, block.v_TGd, from)};
  }

 private:
  Group& cp_;
  Step& step_;
};

Kv take_like(Step& step, const Kv& block, DType dtype) {
  return {step.alloc(block.k_TGd.shape, dtype), step.alloc(block.v_TGd.shape, dtype)};
}

void fill_zero(Step& step, const Kv& block) {
  fill_zero(step.stream, block.k_TGd);
  fill_zero(step.stream, block.v_TGd);
}

void add(Step& step, const Kv& to, const Kv& x) {
  add(step.stream, to.k_TGd, x.k_TGd);
  add(step.stream, to.v_TGd, x.v_TGd);
}

// sum += part, in f32.
void add_part(Step& step, Tensor sum, Tensor part) {
  StackScope scope(step.stack);
  Tensor wide = part;
  if (part.dtype != DType::f32) {
    wide = step.alloc(part.shape, DType::f32);
    copy(step.stream, wide, part);
  }
  add(step.stream, sum, wide);
}

// Pairs of a piece of queries on this rank and a piece of keys of another, where some query sees
// some key.
struct Pair {
  int64_t b;
  int q_half, kv_half;
  int64_t q_piece, kv_piece;
};

// A pass over the keys of one rank. It says which ranks these keys and the queries belong to, and
// how the sequences are cut.
struct Place {
  const ContextParallelSpec& spec;
  Pieces pieces;
  int64_t q_rank, kv_rank;
  Tensor starts_T;  // document starts of the queries, or empty

  // Returns whether some query of the pair's piece sees some of its keys: these are not all later, nor all before
  // the window of the first query.
  bool meets(const Pair& at) const {
    const int64_t last_key = (at.kv_piece + 1) * pieces.length - 1, first_query = at.q_piece * pieces.length;
    return at.kv_piece <= at.q_piece && (spec.window == 0 || last_key > first_query - spec.window);
  }
};

template <class F>
void for_each_pair(const Place& in, F&& fn) {
  const Pieces& pieces = in.pieces;
  for (int64_t b = 0; b < pieces.batch; ++b) {
    for (const int q : {0, 1}) {
      for (const int kv : {0, 1}) {
        const Pair pair{b, q, kv, pieces.on_rank(in.q_rank, q), pieces.on_rank(in.kv_rank, kv)};
        if (in.meets(pair)) fn(pair);
      }
    }
  }
}

// Sets the fields that both passes of attention share for a pair.
template <class Op>
void place(Op& op, const Place& in, const Pair& at) {
  const int64_t length = in.pieces.length;
  if (!in.starts_T.empty()) op.doc_start_T = in.pieces.here(in.starts_T, at.b, at.q_half);
  op.window = in.spec.window;
  op.scale = in.spec.scale;
  op.is_part = true;
  op.q_first = at.q_piece * length;
  op.kv_first = at.kv_piece * length;
}

// Merges the keys of a block into o (f32) and lse of this rank's queries.
void attend(Step& step, const Place& in, Tensor o_THd, Tensor lse_TH, Tensor q_THd, const Kv& sent) {
  StackScope scope(step.stack);
  const Pieces& pieces = in.pieces;
  const Kv block = expanded(step, in.spec, sent);
  const Tensor part_PHd = step.alloc({pieces.length, o_THd.dim(1), o_THd.dim(2)}, q_THd.dtype),
               part_PH = step.alloc({pieces.length, o_THd.dim(1)}, DType::f32);
  for_each_pair(in, [&](const Pair& at) {
    AttentionFwd a{.o_THd = part_PHd,
                   .lse_TH = part_PH,
                   .q_THd = pieces.here(q_THd, at.b, at.q_half),
                   .k_UGd = pieces.here(block.k_TGd, at.b, at.kv_half),
                   .v_UGd = pieces.here(block.v_TGd, at.b, at.kv_half)};
    place(a, in, at);
    run_attention(step, a);
    attention_merge(step.stream, {.o_THd = pieces.here(o_THd, at.b, at.q_half),
                                  .lse_TH = pieces.here(lse_TH, at.b, at.q_half),
                                  .part_THd = part_PHd,
                                  .part_lse_TH = part_PH});
  });
}

// The results of attention for the queries of this rank, and the derivative that backward received.
struct Attended {
  Tensor q_THd, do_THd, o_THd, lse_TH;
};

// dq and dblock (f32) += the derivatives w.r.t. these queries and the keys of a block.
void attend_keys_bwd(Step& step, const Place& in, Tensor dq_THd, const Kv& dblock, const Attended& x, const Kv& block) {
  StackScope scope(step.stack);
  const Pieces& pieces = in.pieces;
  const auto take_piece = [&](const Tensor& t) { return step.alloc(pieces.here(t, 0, 0).shape, t.dtype); };
  const Tensor dq = take_piece(x.q_THd), dk = take_piece(block.k_TGd), dv = take_piece(block.v_TGd);
  for_each_pair(in, [&](const Pair& at) {
    AttentionBwd a{.dq_THd = dq,
                   .dk_TGd = dk,
                   .dv_TGd = dv,
                   .do_THd = pieces.here(x.do_THd, at.b, at.q_half),
                   .o_THd = pieces.here(x.o_THd, at.b, at.q_half),
                   .lse_TH = pieces.here(x.lse_TH, at.b, at.q_half),
                   .q_THd = pieces.here(x.q_THd, at.b, at.q_half),
                   .k_TGd = pieces.here(block.k_TGd, at.b, at.kv_half),
                   .v_TGd = pieces.here(block.v_TGd, at.b, at.kv_half)};
    place(a, in, at);
    run_attention(step, a);
    add_part(step, pieces.here(dq_THd, at.b, at.q_half), dq);
    add_part(step, pieces.here(dblock.k_TGd, at.b, at.kv_half), dk);
    add_part(step, pieces.here(dblock.v_TGd, at.b, at.kv_half), dv);
  });
}

Kv as_dtype(Step& step, const Kv& x, DType dtype) {
  if (x.k_TGd.dtype == dtype) return x;
  const Kv narrow = take_like(step, x, dtype);
  copy(step.stream, narrow.k_TGd, x.k_TGd);
  copy(step.stream, narrow.v_TGd, x.v_TGd);
  return narrow;
}

// The same with a block as ranks send it: dsent (f32) += its derivatives.
void attend_bwd(Step& step, const Place& in, Tensor dq_THd, const Kv& dsent, const Attended& x, const Kv& sent) {
  if (in.spec.expansion == nullptr) return attend_keys_bwd(step, in, dq_THd, dsent, x, sent);
  StackScope scope(step.stack);
  const Kv block = expanded(step, in.spec, sent), dblock = take_like(step, block, DType::f32),
           part = take_like(step, sent, sent.k_TGd.dtype);
  fill_zero(step, dblock);
  attend_keys_bwd(step, in, dq_THd, dblock, x, block);
  in.spec.expansion->expand_bwd(step, {.dsent = part,
                                       .dkv = as_dtype(step, dblock, block.k_TGd.dtype),
                                       .sent = sent,
                                       .heads = in.spec.head_range(),
                                       .is_first = in.q_rank == in.kv_rank});
  add_part(step, dsent.k_TGd, part.k_TGd);
  add_part(step, dsent.v_TGd, part.v_TGd);
}

}  // namespace

void RingContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const Ring ring(cp_, step);
  const Pieces pieces = Pieces::of(cp_, step, o_THd.dim(0));
  const Tensor sum_THd = step.alloc(o_THd.shape, DType::f32);
  const float nothing = -std::numeric_limits<float>::infinity();
  fill_zero(step.stream, sum_THd);
  fill_normal(step.stream, {.x = lse_TH, .rng = Rng(0, RngSite::init), .mean = nothing, .std = 0.0f});
  Kv block = in.kv();
  const std::array<Kv, 2> buffers{take_like(step, block, in.k_TGd.dtype), take_like(step, block, in.k_TGd.dtype)};
  for (int pass = 0; pass < cp_.size(); ++pass) {
    Passing arriving, leaving;
    if (pass + 1 < cp_.size()) arriving = ring.recv(buffers[pass % 2]), leaving = ring.send(block);
    attend(step, {spec_, pieces, cp_.rank(), ring.owner(pass), in.doc_start_T}, sum_THd, lse_TH, in.q_THd, block);
    arriving.wait();
    leaving.wait();
    block = buffers[pass % 2];
  }
  add_sinks(step, sum_THd, lse_TH, in.sink_H);  // the whole of each query's keys, merged
  copy(step.stream, o_THd, sum_THd);
}

// Keys and values go round as in forward. The gradients of a block follow it one pass later. They
// begin on the rank after its owner, and each rank adds its queries' share. The last rank sends
// them to the owner, which adds its own.
void RingContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  const auto& [grads, do_THd, o_THd, lse_TH, in] = a;
  StackScope scope(step.stack);
  const Ring ring(cp_, step);
  const Pieces pieces = Pieces::of(cp_, step, o_THd.dim(0));
  Kv block = in.kv();
  const auto take = [&](DType dtype) { return take_like(step, block, dtype); };
  const DType dtype = in.k_TGd.dtype;
  const std::array<Kv, 2> buffers{take(dtype), take(dtype)}, share{take(DType::f32), take(DType::f32)};
  const Kv own = take(DType::f32), arrived = take(DType::f32);
  const Tensor dq_THd = step.alloc(grads.q_THd.shape, DType::f32);
  fill_zero(step.stream, dq_THd);
  Passing share_leaving;
  for (int pass = 0; pass < cp_.size(); ++pass) {
    Passing arriving, leaving, share_arriving;
    if (pass >= 2) share_arriving = ring.recv(arrived);
    if (pass + 1 < cp_.size()) arriving = ring.recv(buffers[pass % 2]), leaving = ring.send(block);
    const Kv& sum = pass == 0 ? own : share[pass % 2];
    fill_zero(step, sum);
    attend_bwd(step, {spec_, pieces, cp_.rank(), ring.owner(pass), in.doc_start_T}, dq_THd, sum,
               {in.q_THd, do_THd, o_THd, lse_TH}, block);
    share_arriving.wait();
    if (pass >= 2) add(step, sum, arrived);
    share_leaving.wait();
    if (pass >= 1) share_leaving = ring.send(sum);
    arriving.wait();
    leaving.wait();
    block = buffers[pass % 2];
  }
  ring.recv(arrived).wait();
  share_leaving.wait();
  add(step, own, arrived);
  copy(step.stream, grads.q_THd, dq_THd);
  copy(step.stream, grads.k_TGd, own.k_TGd);
  copy(step.stream, grads.v_TGd, own.v_TGd);
  add_sinks_bwd(step, grads.sink_H, {.do_THd = do_THd, .o_THd = o_THd, .lse_TH = lse_TH}, in.sink_H);
}

}  // namespace moebius

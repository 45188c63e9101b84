#include <array>
#include <limits>
#include <utility>

#include "model/attention/context_parallel_impl.h"
#include "ops/attention/attention_merge.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// The two messages that move a block of keys: its send and its receive.
struct Passing {
  Pending k, v;
  void wait() {
    k.wait();
    v.wait();
  }
};

// The ring of blocks. Each rank sends its block to rank + 1, so that after i passes a rank has the block of rank - i.
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

Kv alloc_like(Step& step, const Kv& block, DType dtype) {
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

// A piece of queries of this rank and a piece of keys of another rank, of which some query attends to some key.
struct Pair {
  int64_t b;
  int q_half, kv_half;
  int64_t q_piece, kv_piece;
};

// A pass over the block of keys of one rank: the ranks of the queries and of the keys, and the pieces of sequences.
struct BlockPass {
  const ContextParallelSpec& spec;
  Pieces pieces;
  int64_t q_rank, kv_rank;

  // Returns whether some query of the pair attends to some of its keys: the keys are not all later, and not all before
  // the window of the first query.
  bool meets(const Pair& at) const {
    const int64_t last_key = (at.kv_piece + 1) * pieces.length - 1, first_query = at.q_piece * pieces.length;
    return at.kv_piece <= at.q_piece && (spec.window == 0 || last_key > first_query - spec.window);
  }
};

template <class F>
void for_each_pair(const BlockPass& in, F&& fn) {
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

QueryPositions positions_of(const BlockPass& in, const Pair& at) {
  return {.is_part = true, .q_first = at.q_piece * in.pieces.length, .kv_first = at.kv_piece * in.pieces.length};
}

Kv keys_of(const BlockPass& in, const Pair& at, const Kv& block) {
  return {in.pieces.here(block.k_TGd, at.b, at.kv_half), in.pieces.here(block.v_TGd, at.b, at.kv_half)};
}

// Merges the attention over a block of keys into queries.o (f32) and queries.lse.
void merge_block(Step& step, const BlockPass& in, const QueryRows& queries, const Kv& sent) {
  StackScope scope(step.stack);
  const Pieces& pieces = in.pieces;
  const Kv block = expanded(step, in.spec, sent);
  const Tensor part_PHd = step.alloc({pieces.length, queries.o_THd.dim(1), queries.o_THd.dim(2)}, queries.q_THd.dtype),
               part_PH = step.alloc({pieces.length, queries.o_THd.dim(1)}, DType::f32);
  for_each_pair(in, [&](const Pair& at) {
    const QueryRows merged = queries.piece(pieces, at.b, at.q_half);
    QueryRows part = merged;
    part.o_THd = part_PHd;
    part.lse_TH = part_PH;
    attend(step, in.spec, part, keys_of(in, at, block), positions_of(in, at));
    attention_merge(step.stream,
                    {.o_THd = merged.o_THd, .lse_TH = merged.lse_TH, .part_THd = part_PHd, .part_lse_TH = part_PH});
  });
}

// queries.dq and dblock (both f32) += the derivatives w.r.t. the queries and the keys of a block.
void add_block_bwd(Step& step, const BlockPass& in, const Kv& dblock, const QueryRows& queries, const Kv& block) {
  StackScope scope(step.stack);
  const Pieces& pieces = in.pieces;
  const auto alloc_piece = [&](const Tensor& t) { return step.alloc(pieces.here(t, 0, 0).shape, t.dtype); };
  const Tensor dq = alloc_piece(queries.q_THd);
  const Kv dkv{alloc_piece(block.k_TGd), alloc_piece(block.v_TGd)};
  for_each_pair(in, [&](const Pair& at) {
    const QueryRows sums = queries.piece(pieces, at.b, at.q_half);
    QueryRows part = sums;
    part.dq_THd = dq;
    attend_bwd(step, in.spec, dkv, part, keys_of(in, at, block), positions_of(in, at));
    const Kv dkeys = keys_of(in, at, dblock);
    add_part(step, sums.dq_THd, dq);
    add_part(step, dkeys.k_TGd, dkv.k_TGd);
    add_part(step, dkeys.v_TGd, dkv.v_TGd);
  });
}

Kv as_dtype(Step& step, const Kv& x, DType dtype) {
  if (x.k_TGd.dtype == dtype) return x;
  const Kv narrow = alloc_like(step, x, dtype);
  copy(step.stream, narrow.k_TGd, x.k_TGd);
  copy(step.stream, narrow.v_TGd, x.v_TGd);
  return narrow;
}

// Does the same for a block in the form in which ranks send it: dsent (f32) += its derivatives.
void add_sent_bwd(Step& step, const BlockPass& in, const Kv& dsent, const QueryRows& queries, const Kv& sent) {
  if (in.spec.expansion == nullptr) return add_block_bwd(step, in, dsent, queries, sent);
  StackScope scope(step.stack);
  const Kv block = expanded(step, in.spec, sent), dblock = alloc_like(step, block, DType::f32),
           part = alloc_like(step, sent, sent.k_TGd.dtype);
  fill_zero(step, dblock);
  add_block_bwd(step, in, dblock, queries, block);
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
  const QueryRows queries{.q_THd = in.q_THd, .o_THd = sum_THd, .lse_TH = lse_TH, .doc_start_T = in.doc_start_T};
  Kv block = in.kv();
  const std::array<Kv, 2> buffers{alloc_like(step, block, in.k_TGd.dtype), alloc_like(step, block, in.k_TGd.dtype)};
  for (int pass = 0; pass < cp_.size(); ++pass) {
    Passing arriving, leaving;
    if (pass + 1 < cp_.size()) arriving = ring.recv(buffers[pass % 2]), leaving = ring.send(block);
    merge_block(step, {spec_, pieces, cp_.rank(), ring.owner(pass)}, queries, block);
    arriving.wait();
    leaving.wait();
    block = buffers[pass % 2];
  }
  add_sinks(step, sum_THd, lse_TH, in.sink_H);  // each query's attention to all of its keys is merged now
  copy(step.stream, o_THd, sum_THd);
}

// Keys and values are sent around the ring as in forward. The gradients of a block follow it one pass later. They begin
// on the rank after its owner, and each rank adds the share of its queries. The last rank sends them to the owner,
// which adds its own share.
void RingContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  StackScope scope(step.stack);
  const Ring ring(cp_, step);
  const Pieces pieces = Pieces::of(cp_, step, a.o_THd.dim(0));
  Kv block = a.in.kv();
  const auto alloc = [&](DType dtype) { return alloc_like(step, block, dtype); };
  const DType dtype = a.in.k_TGd.dtype;
  const std::array<Kv, 2> buffers{alloc(dtype), alloc(dtype)}, share{alloc(DType::f32), alloc(DType::f32)};
  const Kv own = alloc(DType::f32), arrived = alloc(DType::f32);
  QueryRows queries = queries_of(a);
  queries.dq_THd = step.alloc(a.grads.q_THd.shape, DType::f32);
  fill_zero(step.stream, queries.dq_THd);
  Passing share_leaving;
  for (int pass = 0; pass < cp_.size(); ++pass) {
    Passing arriving, leaving, share_arriving;
    if (pass >= 2) share_arriving = ring.recv(arrived);
    if (pass + 1 < cp_.size()) arriving = ring.recv(buffers[pass % 2]), leaving = ring.send(block);
    if (pass == 0) compute_do(a);
    const Kv& sum = pass == 0 ? own : share[pass % 2];
    fill_zero(step, sum);
    add_sent_bwd(step, {spec_, pieces, cp_.rank(), ring.owner(pass)}, sum, queries, block);
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
  copy(step.stream, a.grads.q_THd, queries.dq_THd);
  copy(step.stream, a.grads.k_TGd, own.k_TGd);
  copy(step.stream, a.grads.v_TGd, own.v_TGd);
  add_sinks_bwd(step, a.grads.sink_H, queries, a.in.sink_H);
}

}  // namespace moebius

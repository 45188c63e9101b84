// Attention of sequences whose tokens are spread over the ranks of cp
// (model/attention/token_runs.h). All ways have one contract: a rank's queries see exactly the keys
// that they would see on one rank. There are four ways to bring queries and keys together:
//
//   allgather  Every rank gathers all keys and values, and attends with its two pieces of queries
//              (Llama 3, arXiv 2407.21783, section 3.3.2). In the backward their gradients are
//              summed on the ranks that own them.
//   ring       Keys and values go round the ranks, and results over each block are merged by their
//              log-sums (Ring Attention, arXiv 2310.01889; zig-zag pieces: arXiv 2311.09431). In the
//              backward the gradients travel along with them.
//   alltoall   Ranks exchange rows for heads, and each attends with all rows of its heads
//              (DeepSpeed Ulysses, arXiv 2309.14509).
//   hierarchical  alltoall between the neighbours of Axis::cp_inner, which share a fast domain, and a
//              ring over Axis::cp_outer between the domains (LoongTrain, arXiv 2406.18485; USP, arXiv
//              2405.07719). The rows of the neighbours are two pieces of a sequence that is cut into
//              2 cp_outer pieces, so the ring has what it has without levels.
//
// A layer may have keys and values that are made of something smaller (KvExpansion): the latents of
// latent attention. Then ranks exchange that, and each makes the keys and values that it reads.
//
// With dynamic cp a micro-batch says how many neighbours share its sequences (MicroBatch::cp).
//
// This table gives the bytes that a rank sends. Its keys and values have b bytes, its queries q
// bytes (o the same), and f is the number of elements of keys and values times 4:
//
//              forward                           backward
//   allgather  (cp - 1) b                        the same, twice
//   ring       (cp - 1) b                        the same, and (cp - 1) f
//   alltoall   (cp - 1) / cp (2 q + b + 4 cp T)  (cp - 1) / cp (4 q + 2 b + 4 cp T)
//
// In the row of alltoall the forward sends q, o, k and v; the backward sends those and the
// gradients of all. 4 cp T are the document starts, if there are any.
// hierarchical sends the row of alltoall over cp_inner, and that of the ring over cp_outer with the
// keys and values that a rank has after the exchange of heads: as many bytes as before.
// With an expansion, b and f are those of what is exchanged. alltoall and hierarchical gather it in the
// fast domain instead: the first row's bytes in place of b. hierarchical's ring then has cp_inner b.
#pragma once

#include <memory>

#include "comm/mesh.h"
#include "model/step.h"

namespace moebius {

// Keys and values of some rows, or what they are made of (KvExpansion), or the gradients of either.
struct Kv {
  Tensor k_TGd, v_TGd;
};

// Queries, keys and values, rotated; or their gradients. v (and o) may be narrower than q and k.
// sink_H has the sink of each head (ops/attention/attention_sink.h), f32; it is empty without
// sinks. As a gradient it is added to.
// doc_start_T has the document starts of the rows (MicroBatch::attention_starts). No gradient has them.
struct Qkv {
  Tensor q_THd, k_TGd, v_TGd, sink_H = {}, doc_start_T = {};
  Kv kv() const { return {k_TGd, v_TGd}; }
};

// Heads [first, first + count) of a rank.
struct HeadRange {
  int64_t first = 0, count = 0;
};

// Makes keys and values of what ranks exchange in place of them. `sent` has one group: k_TGd [T, 1, w],
// v_TGd [T, 1, w'].
class KvExpansion {
 public:
  virtual ~KvExpansion() = default;
  // The keys and values of these heads for rows of any rank, on the step stack.
  virtual Kv expand(Step& step, const Kv& sent, const HeadRange& heads) const = 0;
  // dsent: written, the derivatives w.r.t. sent, from those w.r.t. the keys and values of these heads.
  // The gradients of weights are added to. is_first: no call of this micro-batch came before.
  struct Bwd {
    Kv dsent, dkv, sent;
    HeadRange heads;
    bool is_first = true;
  };
  virtual void expand_bwd(Step& step, const Bwd& a) const = 0;
};

struct ContextParallelSpec {
  int64_t heads = 0, kv_heads = 0;  // of this rank, after tp
  int64_t window = 0;
  float scale = 1.0f;
  const KvExpansion* expansion = nullptr;  // null: ranks exchange keys and values; must outlive the layer's passes
  int64_t first_head = 0;                  // for the expansion
  HeadRange head_range() const { return {first_head, heads}; }
};

// The arguments of the backward pass. `in`, o and lse are those of the forward pass.
struct ContextParallelBwd {
  const Qkv& grads;  // out
  Tensor do_THd, o_THd, lse_TH;
  const Qkv& in;
};

class ContextParallel {
 public:
  virtual ~ContextParallel() = default;
  // Writes o of this rank's rows. lse is f32: one number for each row and head, in the form that
  // backward reads. Each sink counts once, over all keys of a query. The sinks' gradient covers the
  // queries that this rank has, or whose heads it has.
  virtual void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const = 0;
  virtual void backward(Step& step, const ContextParallelBwd& a) const = 0;
};

// With cp = 1 attention is one op on the rows that are here. Error{usage} with the equation when
// alltoall or hierarchical cannot share the heads.
std::unique_ptr<ContextParallel> make_context_parallel(CpComm comm, const Mesh& mesh, const ContextParallelSpec& spec);

}  // namespace moebius

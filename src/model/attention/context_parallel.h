// Context parallelism: attention of sequences whose tokens are spread over the ranks of cp
// (model/attention/token_runs.h). A query attends to exactly the keys that it would attend to on one rank. There are
// four methods to bring queries and keys together (CpComm):
//
//   allgather  Every rank gathers all keys and values, and attends with its two pieces of queries
//              (Llama 3, arXiv 2407.21783, section 3.3.2). In the backward their gradients are
//              summed on the ranks that own them.
//   ring       Keys and values are sent around the ring of ranks, and results over each block are merged by their
//              log-sums (Ring Attention, arXiv 2310.01889; zig-zag pieces: arXiv 2311.09431). In the
//              backward the gradients are sent along with them.
//   alltoall   Ranks exchange rows for heads, and each attends with all rows of its heads
//              (DeepSpeed Ulysses, arXiv 2309.14509).
//   hierarchical  alltoall between the ranks of Axis::cp_inner, which have a fast interconnect, and a ring
//              over Axis::cp_outer (LoongTrain, arXiv 2406.18485; USP, arXiv 2405.07719). After the exchange
//              of heads, the rows of a cp_inner group are two pieces of a sequence that is cut into
//              2 cp_outer pieces, as the ring needs.
//
// The keys and values of a layer may be computed from something smaller (KvExpansion): the latents of latent attention.
// Then ranks exchange the latents, and each rank computes the keys and values that it reads.
//
// With dynamic cp, MicroBatch::cp is the number of consecutive ranks that share a sequence.
//
// The table has the bytes that a rank sends. Its keys and values have b bytes, its queries and its outputs q bytes
// each, and f is 4 times the number of elements of its keys and values:
//
//              forward                           backward
//   allgather  (cp - 1) b                        the same, twice
//   ring       (cp - 1) b                        the same, and (cp - 1) f
//   alltoall   (cp - 1) / cp (2 q + b + 4 cp T)  (cp - 1) / cp (4 q + 2 b + 4 cp T)
//
// alltoall sends q, o, k and v in the forward, and those and all gradients in the backward. 4 cp T are the document
// starts, if there are any. hierarchical sends the bytes of alltoall over cp_inner, and those of the ring over
// cp_outer, with the same b and f. With an expansion, b and f are those of the latents. alltoall and hierarchical then
// all-gather the latents over their group, with the bytes of the first row in place of b, and the ring of hierarchical
// has cp_inner b.
#pragma once

#include <functional>
#include <memory>

#include "comm/mesh.h"
#include "device/gpu_kernels.h"
#include "model/step.h"

namespace moebius {

// Keys and values of some rows, or the input of their expansion (KvExpansion), or the gradients of either.
struct Kv {
  Tensor k_TGd, v_TGd;
};

// Queries, keys and values after RoPE, or their gradients. v may be narrower than q and k.
// sink_H: the sink of each head (ops/attention/attention_sink.h), f32; empty without sinks. Its gradient is added to.
// doc_start_T: the document starts of the rows (MicroBatch::attention_starts); empty in gradients.
struct Qkv {
  Tensor q_THd, k_TGd, v_TGd, sink_H = {}, doc_start_T = {};
  Kv kv() const { return {k_TGd, v_TGd}; }
};

// Heads [first, first + count) of a rank.
struct HeadRange {
  int64_t first = 0, count = 0;
};

// Computes keys and values from the smaller tensors that ranks exchange. `sent` has one kv head: k_TGd [T, 1, w],
// v_TGd [T, 1, w'].
class KvExpansion {
 public:
  virtual ~KvExpansion() = default;
  // Returns the keys and values of these heads, on the step stack. The rows may be those of any rank.
  virtual Kv expand(Step& step, const Kv& sent, const HeadRange& heads) const = 0;
  // Writes dsent, the derivatives w.r.t. sent, from dkv, those w.r.t. the keys and values of these heads. Adds to the
  // gradients of weights. is_first: this is the first call of the micro-batch.
  struct Bwd {
    Kv dsent, dkv, sent;
    HeadRange heads;
    bool is_first = true;
  };
  virtual void expand_bwd(Step& step, const Bwd& a) const = 0;
};

struct ContextParallelSpec {
  int64_t heads = 0, kv_heads = 0;  // heads of this rank, after tp
  int64_t window = 0;
  float scale = 1.0f;
  GpuKernels kernels = {};                 // as in LayerContext
  bool overlaps = false;                   // MeshShape::cp_overlap; make_context_parallel sets it
  bool owns_gpu = false;                   // AttentionBwd::owns_gpu; make_context_parallel sets it
  const KvExpansion* expansion = nullptr;  // null: ranks exchange keys and values; must outlive the layer's passes
  int64_t first_head = 0;                  // index among all heads of the rank after tp
  // MaxLogits::Layer::padded_P, which training passes raise; null: none. Must outlive the layer's passes.
  const Tensor* max_logits = nullptr;
  HeadRange head_range() const { return {first_head, heads}; }
};

// The arguments of the backward pass. `in`, o and lse are those of the forward pass.
struct ContextParallelBwd {
  const Qkv& grads;  // out
  Tensor do_THd, o_THd, lse_TH;
  const Qkv& in;
  std::function<void()> compute_do = {};  // writes do_THd, beside the first exchange; empty: it was written before
};

class ContextParallel {
 public:
  virtual ~ContextParallel() = default;
  // Writes o of this rank's rows, and lse (f32, for backward). Each sink counts once in the softmax of a query.
  // The gradient of the sinks covers the queries that this rank computes.
  virtual void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const = 0;
  virtual void backward(Step& step, const ContextParallelBwd& a) const = 0;
};

// Makes the method `comm`; with cp = 1, attention is one op on this rank's rows. The rank owns its GPU if it is the
// only one of the mesh: with several, kernels that send and receive may run at the same time. Throws Error{usage}
// with the equation if alltoall or hierarchical cannot divide the heads.
std::unique_ptr<ContextParallel> make_context_parallel(CpComm comm, const Mesh& mesh, ContextParallelSpec spec);

}  // namespace moebius

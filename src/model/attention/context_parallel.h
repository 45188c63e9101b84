// Attention of sequences whose tokens are spread over the ranks of cp
// (model/attention/token_runs.h). All ways have one contract: a rank's queries see exactly the keys
// that they would see on one rank. There are three ways to bring queries and keys together:
//
//   allgather  Every rank gathers all keys and values, and attends with its two pieces of queries
//              (Llama 3, arXiv 2407.21783, section 3.3.2). In the backward their gradients are
//              summed on the ranks that own them.
//   ring       Keys and values go round the ranks, and results over each block are merged by their
//              log-sums (Ring Attention, arXiv 2310.01889; zig-zag pieces: arXiv 2311.09431). In the
//              backward the gradients travel along with them.
//   alltoall   Ranks exchange rows for heads, and each attends with all rows of its heads
//              (DeepSpeed Ulysses, arXiv 2309.14509).
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
#pragma once

#include <memory>

#include "comm/mesh.h"
#include "model/step.h"

namespace moebius {

// Queries, keys and values, rotated; or their gradients. v (and o) may be narrower than q and k.
// sink_H has the sink of each head (ops/attention/attention_sink.h), f32; it is empty without
// sinks. As a gradient it is added to.
struct Qkv {
  Tensor q_THd, k_TGd, v_TGd, sink_H = {};
};

struct ContextParallelSpec {
  int64_t heads = 0, kv_heads = 0;  // of this rank, after tp
  int64_t window = 0;
  float scale = 1.0f;
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
// alltoall cannot share the heads.
std::unique_ptr<ContextParallel> make_context_parallel(CpComm comm, const Mesh& mesh, const ContextParallelSpec& spec);

}  // namespace moebius

// Attention of sequences whose tokens lie on the ranks of cp (model/attention/token_runs.h), behind one contract: what a rank's
// queries see is what they see on one rank. Three ways to bring queries and keys together:
//
//   allgather  every rank gathers all keys and values, and attends with its two pieces of queries (Llama 3, arXiv
//              2407.21783, section 3.3.2); in the backward their gradients are summed where they belong
//   ring       keys and values go round the ranks, results over each block are merged by their log-sums (Ring
//              Attention, arXiv 2310.01889; zig-zag pieces: arXiv 2311.09431); in the backward their gradients go along
//   alltoall   ranks change rows for heads, and each attends with all rows of
//              its heads (DeepSpeed Ulysses, arXiv 2309.14509)
//
// Bytes sent by a rank for keys and values of b bytes, queries of q bytes (o alike), and f their elements times 4:
//
//              forward                           backward
//   allgather  (cp - 1) b                        the same, twice
//   ring       (cp - 1) b                        the same, and (cp - 1) f
//   alltoall   (cp - 1) / cp (2 q + b + 4 cp T)  (cp - 1) / cp (4 q + 2 b + 4 cp T), 4 T cp: document starts, if any
//
// The last: q, o and k, v; then those and the gradients of all.
#pragma once

#include <memory>

#include "comm/mesh.h"
#include "model/step.h"

namespace moebius {

// Queries, keys and values, rotated; or their gradients. v (and o) may be narrower than q and k. The sink of each head
// (ops/attention/attention_sink.h) where there are some, else empty: f32, and as a gradient added to.
struct Qkv {
  Tensor q_THd, k_TGd, v_TGd, sink_H = {};
};

struct ContextParallelSpec {
  int64_t heads = 0, kv_heads = 0;  // of this rank, after tp
  int64_t window = 0;
  float scale = 1.0f;
};

class ContextParallel {
 public:
  virtual ~ContextParallel() = default;
  // o of this rank's rows. lse: f32, one number for each row and head, as backward wants them. Sinks are taken in once,
  // by the whole of a query's keys; their gradient is of the queries that this rank has, or has the heads of.
  virtual void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const = 0;
  virtual void backward(Step& step, const Qkv& grads, Tensor do_THd, Tensor o_THd, Tensor lse_TH,
                        const Qkv& in) const = 0;
};

// With cp = 1 attention is one op on the rows that are here. Error{usage} with the equation when alltoall cannot share
// the heads.
std::unique_ptr<ContextParallel> make_context_parallel(CpComm comm, const Mesh& mesh, const ContextParallelSpec& spec);

}  // namespace moebius

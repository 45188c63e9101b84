// The methods of context parallelism (context_parallel.h), and the functions that they share.
#pragma once

#include "model/attention/context_parallel.h"
#include "model/attention/row_blocks.h"
#include "ops/attention/attention.h"

namespace moebius {

// A sequence is cut into 2 cp equal pieces. Rank r has the pieces r (half 0) and 2 cp - 1 - r (half 1), in this order
// (model/attention/token_runs.h).
struct Pieces {
  int64_t cp, batch, length;  // length: rows of a piece
  static Pieces of(const Group& cp, const Step& step, int64_t rows) {
    return {cp.size(), step.batch.shape.batch, rows / step.batch.shape.batch / 2};
  }
  int64_t count() const { return 2 * cp; }
  int64_t on_rank(int64_t cp_rank, int half) const { return half == 0 ? cp_rank : 2 * cp - 1 - cp_rank; }
  // Returns the rows of piece `half` of sequence b among the rows of a rank.
  Tensor here(const Tensor& x_T, int64_t b, int half) const {
    const int64_t first = (2 * b + half) * length;
    return x_T.rows(first, first + length);
  }
  // Returns the rows of pieces [0, n) of sequence b. x_U: the rows of all ranks, sequence after sequence.
  Tensor first(const Tensor& x_U, int64_t b, int64_t n) const {
    const int64_t begin = b * count() * length;
    return x_U.rows(begin, begin + n * length);
  }
};

// The tensors of attention with a row for each query. o and lse are results of the forward; dq is that of the backward.
struct QueryRows {
  Tensor q_THd, o_THd, lse_TH;
  Tensor do_THd = {}, dq_THd = {};  // only in the backward
  Tensor doc_start_T = {};          // empty without documents
  // Returns the rows of piece `half` of sequence b, of each tensor.
  QueryRows piece(const Pieces& pieces, int64_t b, int half) const;
};

// Writes a.do_THd, if that is left to the backward pass.
void compute_do(const ContextParallelBwd& a);

// Returns the query rows of a backward pass, with a.grads.q as dq.
QueryRows queries_of(const ContextParallelBwd& a);

// Attention of some queries over some keys, as a part (ops/attention/attention.h) if it is not of whole sequences.
struct QueryPositions {
  bool is_part = false;
  int64_t q_first = 0, kv_first = 0;
};
// Run an attention op with scratch from the step stack, for the duration of the call. The backward writes queries.dq
// and dkv.
void attend(Step& step, const ContextParallelSpec& spec, const QueryRows& queries, const Kv& kv,
            const QueryPositions& at = {});
// Returns the op of attend_bwd, without scratch.
AttentionBwd attention_bwd_of(const Step& step, const ContextParallelSpec& spec, const Kv& dkv,
                              const QueryRows& queries, const Kv& kv, const QueryPositions& at = {});
void attend_bwd(Step& step, const ContextParallelSpec& spec, const Kv& dkv, const QueryRows& queries, const Kv& kv,
                const QueryPositions& at = {});

// Apply the sinks, if there are any, to the result of attention over all keys, and add to their gradients.
void add_sinks(Step& step, Tensor o_THd, Tensor lse_TH, Tensor sink_H);
void add_sinks_bwd(Step& step, Tensor dsink_H, const QueryRows& queries, Tensor sink_H);

// Returns the keys and values that attention reads: `sent` itself, or its expansion if the spec has one.
Kv expanded(Step& step, const ContextParallelSpec& spec, const Kv& sent);

// Copy all rows from the order of ranks to the order of sequences, and back.
void to_sequences(Step& step, const Pieces& pieces, Tensor sequences_U, Tensor ranks_U);
void to_ranks(Step& step, const Pieces& pieces, Tensor ranks_U, Tensor sequences_U);

// Returns x of all ranks in the order of sequences, [cp T, ...] on the step stack.
Tensor gather_sequences(Step& step, Group& cp, Tensor x_TGd);
// Returns gather_sequences() of k and v, which overlaps with a.compute_do if spec.overlaps.
Kv gather_beside_do(Step& step, Group& cp, const ContextParallelSpec& spec, const ContextParallelBwd& a);
// dx = this rank's rows of the sum over ranks of dx_U, whose rows are in the order of sequences.
void sum_of_sequences(Step& step, Group& cp, Tensor dx_TGd, Tensor dx_UGd);

// Context parallelism with cp = 1: this rank has all rows.
class NoContextParallel final : public ContextParallel {
 public:
  explicit NoContextParallel(const ContextParallelSpec& spec) : spec_(spec) {}
  void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const override;
  void backward(Step& step, const ContextParallelBwd& a) const override;
  const ContextParallelSpec& spec() const { return spec_; }

 private:
  ContextParallelSpec spec_;
};

class AllGatherContextParallel final : public ContextParallel {
 public:
  AllGatherContextParallel(Group& cp, const ContextParallelSpec& spec) : cp_(cp), spec_(spec) {}
  void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const override;
  void backward(Step& step, const ContextParallelBwd& a) const override;

 private:
  Group& cp_;
  ContextParallelSpec spec_;
};

class RingContextParallel final : public ContextParallel {
 public:
  RingContextParallel(Group& cp, const ContextParallelSpec& spec) : cp_(cp), spec_(spec) {}
  void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const override;
  void backward(Step& step, const ContextParallelBwd& a) const override;

 private:
  Group& cp_;
  ContextParallelSpec spec_;
};

// Exchanges rows for heads in the group cp. With `outer`, the group has only some rows of a sequence, and attention of
// the heads is a ring over outer; without, it is one op.
class AllToAllContextParallel final : public ContextParallel {
 public:
  AllToAllContextParallel(Group& cp, const ContextParallelSpec& spec, Group* outer = nullptr);
  void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const override;
  void backward(Step& step, const ContextParallelBwd& a) const override;

 private:
  Tensor to_heads(Step& step, Tensor x_THd) const;             // all rows of this rank's heads, on the stack
  void to_rows(Step& step, Tensor x_THd, Tensor x_UHd) const;  // the inverse of to_heads
  Qkv exchange(Step& step, const Qkv& in) const;               // to_heads of q, k and v
  Tensor starts_of_all(Step& step, Tensor starts_T) const;
  Tensor sinks_here(Tensor sink_H) const;

  Group& cp_;
  ContextParallelSpec spec_;
  std::unique_ptr<ContextParallel> of_heads_;
};

}  // namespace moebius

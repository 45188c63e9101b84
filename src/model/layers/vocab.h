// The embedding and the language-model head. tp splits both by the vocabulary: rank r has the r-th block of rows of the
// table; the sizes of blocks differ by at most one row. T is the number of rows of all tp ranks, and t = T / tp that of
// the rank's own rows of the residual stream.
#pragma once

#include "config/model_spec.h"
#include "model/attention/row_blocks.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

// x = table[token]. Each rank looks up the tokens of its block, and the ranks' results are summed.
class Embedding {
 public:
  // Throws Error{usage} when there are more ranks than tokens in the vocabulary.
  Embedding(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh);
  // Makes the embedding of a rank without the embedding stage, over a copy of the table (ParamSpec::tied_copy). If the
  // model ties embedding and head, this is the table of the head. head: null if the head is on another rank.
  static Embedding copy(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh, const Param* head);
  // tokens: i32, of the rows of all tp ranks; further tokens are not read.
  void forward(Step& step, Tensor x_tD, Tensor tokens) const;
  void backward_weight(Step& step, Tensor dx_tD, Tensor token_T) const;
  const Param& table() const { return w_; }

 private:
  Embedding(const Param& table, const ModelSpec& model, const Mesh& mesh);

  RowBlocks rows_;
  int64_t first_;
  const Param& w_;
};

// Logits and loss, in chunks of tokens, so that the logits of a micro-batch are never stored. Between the two passes
// over a chunk, tp ranks exchange three numbers per token (ops/vocab/vocab_blocks.h).
class LmHead {
 public:
  // embedding: the embedding's table on this rank, or null. A tied head uses it, or has a copy of its own.
  LmHead(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh, const Param* embedding);
  // Writes the weighted losses of all T rows (f32) for the batch's targets of this depth, the same on every tp rank.
  // If dx is given, also writes the derivative of the scaled sum of losses w.r.t. x, and adds to the table's gradient.
  void loss(Step& step, int64_t depth, Tensor loss_T, Tensor dx_tD, Tensor x_tD) const;
  // Writes logits for parity checks. Throws Error{usage} with tp > 1.
  void logits(Step& step, Tensor logits_CV, Tensor x_CD) const;
  // Writes the logits of one of the T rows for generation, the same on every tp rank.
  void row_logits(Step& step, Tensor logits_1V, Tensor x_tD, int64_t row) const;
  const Param& table() const { return w_; }

 private:
  // One chunk of rows. dx is empty if no gradient is computed.
  struct LossChunk {
    Tensor loss_C, dx_CD;  // out
    Tensor x_CD, target_C, weight_C;
  };
  void loss_of_chunk(Step& step, int64_t depth, const LossChunk& a) const;

  RowBlocks rows_;
  int64_t vocab_, first_;
  const Param& w_;
};

}  // namespace moebius

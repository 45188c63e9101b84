// The two ends of the model. tp ranks share them by the vocabulary: rank r of tp has the r-th block
// of rows of the table. Blocks differ by one row where tp does not divide the vocabulary. T is the
// number of rows of all tp ranks; t = T / tp is that of the rank's own rows of the residual stream.
#pragma once

#include "config/model_spec.h"
#include "model/attention/row_blocks.h"
#include "model/params.h"
#include "model/step.h"

namespace moebius {

// x = table[token]: each rank looks up the tokens of its block, and the sum over the ranks has them all.
class Embedding {
 public:
  // Error{usage} when there are more ranks than tokens in the vocabulary.
  Embedding(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh);
  // For a rank that does not hold the embedding: an embedding over a copy of the table
  // (ParamSpec::tied_copy). Where the model ties them, that is the copy of the head. head: null
  // where the head is on another rank.
  static Embedding copy(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh, const Param* head);
  // tokens: i32, those of all tp ranks' rows. More may follow them and are not read.
  void forward(Step& step, Tensor x_tD, Tensor tokens) const;
  void backward_weight(Step& step, Tensor dx_tD, Tensor token_T) const;
  const Param& table() const { return w_; }

 private:
  Embedding(const Param& table, const ModelSpec& model, const Mesh& mesh);

  RowBlocks rows_;
  int64_t first_;
  const Param& w_;
};

// Logits and the loss. All logits of a rank's block are never held at once: the tokens are
// worked on in chunks. Between the two passes of a chunk the ranks exchange three numbers per
// token (ops/vocab/vocab_blocks.h).
class LmHead {
 public:
  // embedding: the one on the same rank, or null. A head that is tied to it has its table, or a
  // copy where it is on another rank.
  LmHead(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh, const Param* embedding);
  // Writes the weighted loss of all T rows, the same on every tp rank, for the batch's targets of
  // this depth. If dx is given, it also writes the derivative of the scaled sum of losses w.r.t. x,
  // and adds to the table's gradient.
  void loss(Step& step, int64_t depth, Tensor loss_T, Tensor dx_tD, Tensor x_tD) const;
  // For parity checks. Error{usage} with tp > 1.
  void logits(Step& step, Tensor logits_CV, Tensor x_CD) const;
  // For generation: the logits of one of the T rows of all tp ranks, the same on each of them.
  void row_logits(Step& step, Tensor logits_1V, Tensor x_tD, int64_t row) const;
  const Param& table() const { return w_; }

 private:
  // The rows of one chunk of the head's input. dx is empty where no gradient is computed.
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

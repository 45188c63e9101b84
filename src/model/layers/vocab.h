// The two ends of the model, which tp ranks share by the vocabulary: rank r of tp has the r-th block of the rows of the
// table (blocks differ by one row where tp does not divide the vocabulary). T are the rows of all tp ranks, t = T / tp
// the rank's own rows of the residual stream.
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
  // On a rank that is not the embedding's: over a copy of the table (ParamSpec::tied_copy), that of the head where the
  // model ties them. head: null where it is elsewhere.
  static Embedding copy(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh, const Param* head);
  // tokens: i32, of all tp ranks' rows and maybe more, behind those.
  void forward(Step& step, Tensor x_tD, Tensor tokens) const;
  void backward_weight(Step& step, Tensor dx_tD, Tensor token_T) const;
  const Param& table() const { return w_; }

 private:
  Embedding(const Param& table, const ModelSpec& model, const Mesh& mesh);

  RowBlocks rows_;
  int64_t first_;
  const Param& w_;
};

// Logits and the loss. All logits of a rank's block are never held: chunk after chunk of tokens, and between the two
// passes of a chunk the ranks exchange three numbers per token (ops/vocab/vocab_blocks.h).
class LmHead {
 public:
  // embedding: on the same rank, or null. A head that is tied to it has its table, or a copy where it is elsewhere.
  LmHead(ParamTable& params, const ModelSpec& model, DType dtype, const Mesh& mesh, const Param* embedding);
  // loss of all T rows, the same on every tp rank, weighted, for the batch's targets of this depth; with dx given also
  // the derivative of the scaled sum of losses by x, and the table's gradient.
  void loss(Step& step, int64_t depth, Tensor loss_T, Tensor dx_tD, Tensor x_tD) const;
  // For parity checks. Error{usage} with tp > 1.
  void logits(Step& step, Tensor logits_CV, Tensor x_CD) const;
  // For generation: of one of the T rows of all tp ranks, the same on each of them.
  void row_logits(Step& step, Tensor logits_1V, Tensor x_tD, int64_t row) const;
  const Param& table() const { return w_; }

 private:
  void loss_of_chunk(Step& step, int64_t depth, int64_t begin, int64_t end, Tensor loss_T, Tensor dx_TD,
                     Tensor x_TD) const;

  RowBlocks rows_;
  int64_t vocab_, first_;
  const Param& w_;
};

}  // namespace moebius

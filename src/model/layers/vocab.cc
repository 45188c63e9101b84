#include "model/layers/vocab.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/vocab/vocab.h"
#include "ops/vocab/vocab_blocks.h"

namespace moebius {
namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";

ParamSpec table_spec(const char* name, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const int64_t tp = mesh.shape().tp;
  MOEBIUS_CHECK(usage, m.vocab_size >= tp, "parallel.tp must be at most model.vocab_size = {}; got {}", m.vocab_size,
                tp);
  const Shape whole{m.vocab_size, m.hidden_size};
  const ParamPart part{name, whole, 0, shard_of(whole, 0, mesh.place().tp, tp)};
  return {.name = name,
          .shape = part.local_shape(),
          .dtype = dtype,
          .parts = {part},
          .init_std = static_cast<float>(m.initializer_range),
          .kind = ParamKind::embedding};
}

ParamSpec head_spec(const ModelSpec& m, DType dtype, const Mesh& mesh) {
  ParamSpec spec = table_spec(m.tie_word_embeddings ? kEmbedding : "lm_head.weight", m, dtype, mesh);
  if (!m.tie_word_embeddings) spec.kind = ParamKind::head;
  spec.tied_copy = m.tie_word_embeddings;
  return spec;
}

}  // namespace

Embedding::Embedding(const Param& table, const ModelSpec& m, const Mesh& mesh)
    : rows_(mesh), first_(shard_of({m.vocab_size}, 0, mesh.place().tp, mesh.shape().tp).begin), w_(table) {}

Embedding::Embedding(ParamTable& params, const ModelSpec& m, DType dtype, const Mesh& mesh)
    : Embedding(params.declare(table_spec(kEmbedding, m, dtype, mesh)), m, mesh) {}

Embedding Embedding::copy(ParamTable& params, const ModelSpec& m, DType dtype, const Mesh& mesh, const Param* head) {
  if (m.tie_word_embeddings && head) return Embedding(*head, m, mesh);
  ParamSpec spec = table_spec(kEmbedding, m, dtype, mesh);
  spec.tied_copy = true;
  return Embedding(params.declare(std::move(spec)), m, mesh);
}

void Embedding::forward(Step& step, Tensor x_tD, Tensor tokens) const {
  const Tensor token_T = tokens.rows(0, x_tD.dim(0) * rows_.num_ranks());
  if (rows_.num_ranks() == 1) return embedding_fwd(step.stream, {.x_TD = x_tD, .token_T = token_T, .w_VD = w_.w});
  StackScope scope(step.stack);
  const Tensor x_TD = step.alloc({token_T.dim(0), x_tD.dim(1)}, x_tD.dtype);
  embedding_fwd(step.stream, {.x_TD = x_TD, .token_T = token_T, .w_VD = w_.w, .is_block = true, .first = first_});
  rows_.sum(step, x_tD, x_TD);
}

void Embedding::backward_weight(Step& step, Tensor dx_tD, Tensor token_T) const {
  if (!w_.has_grad) return;
  StackScope scope(step.stack);
  EmbeddingBwd embedding{.dw_VD = w_.dw,
                         .dx_TD = rows_.gather(step, dx_tD),
                         .token_T = token_T,
                         .is_block = rows_.num_ranks() > 1,
                         .first = first_};
  embedding.scratch = step.alloc_bytes(EmbeddingBwd::scratch_bytes(embedding, step.stream));
  embedding_bwd(step.stream, embedding);
}

LmHead::LmHead(ParamTable& params, const ModelSpec& m, DType dtype, const Mesh& mesh, const Param* embedding)
    : rows_(mesh),
      vocab_(m.vocab_size),
      first_(shard_of({m.vocab_size}, 0, mesh.place().tp, mesh.shape().tp).begin),
      w_(m.tie_word_embeddings && embedding ? *embedding : params.declare(head_spec(m, dtype, mesh))) {}

void LmHead::logits(Step& step, Tensor logits_CV, Tensor x_CD) const {
  MOEBIUS_CHECK(usage, rows_.num_ranks() == 1, "logits: a rank must have the whole vocabulary, parallel.tp = 1; got {}",
                rows_.num_ranks());
  gemm(step.stream, {.c_MN = logits_CV, .a = x_CD, .b = w_.w, .trans_b = true, .few_rows = true});
}

void LmHead::row_logits(Step& step, Tensor logits_1V, Tensor x_tD, int64_t row) const {
  const int64_t n = rows_.num_ranks(), t = x_tD.dim(0), longest = div_ceil(vocab_, n), mine = w_.w.dim(0);
  const Tensor row_1D = x_tD.rows(row % t, row % t + 1);
  if (n == 1) return logits(step, logits_1V, row_1D);
  StackScope scope(step.stack);
  const Tensor x_1D = step.alloc(row_1D.shape, x_tD.dtype), blocks_nB = step.alloc({n, longest}, DType::f32),
               block_1B = blocks_nB.rows(rows_.rank(), rows_.rank() + 1);
  copy(step.stream, x_1D, row_1D);
  rows_.group().broadcast(step.stream, x_1D, narrow<int>(row / t));
  const Tensor mine_1B = block_1B.view({longest}).rows(0, mine).view({1, mine});
  gemm(step.stream, {.c_MN = mine_1B, .a = x_1D, .b = w_.w, .trans_b = true, .few_rows = true});
  rows_.group().all_gather(step.stream, blocks_nB, block_1B);
  for (int64_t r = 0; r < n; ++r) {
    const Shard block = shard_of({vocab_}, 0, r, n);
    copy(step.stream, logits_1V.view({vocab_}).rows(block.begin, block.begin + block.count),
         blocks_nB.view({n * longest}).rows(r * longest, r * longest + block.count));
  }
}

void LmHead::loss(Step& step, int64_t depth, Tensor loss_T, Tensor dx_tD, Tensor x_tD) const {
  StackScope scope(step.stack);
  const Targets& targets = step.batch.targets(depth);
  const int64_t T = loss_T.dim(0);
  // The number is the same on every rank, since each chunk has collectives.
  const int64_t C = LmLoss::chunk(T, div_ceil(vocab_, rows_.num_ranks()), step.stream);
  if (rows_.num_ranks() == 1) {
    LmLoss loss{.loss_T = loss_T,
                .logits_CV = step.alloc({C, vocab_}, DType::f32),
                .x_TD = x_tD,
                .w_VD = w_.w,
                .target_T = targets.target_T,
                .weight_T = targets.weight_T,
                .scale_1 = step.batch.objective_scale_1(depth)};
    if (!dx_tD.empty()) {
      loss.dx_TD = dx_tD;
      loss.dw_VD = w_.dw;
      loss.dlogits_CV = step.alloc({C, vocab_}, x_tD.dtype);
    }
    return lm_loss(step.stream, loss);
  }
  const Tensor x_TD = rows_.gather(step, x_tD);
  const Tensor dx_TD = dx_tD.empty() ? Tensor{} : step.alloc(x_TD.shape, x_TD.dtype);
  for (int64_t begin = 0; begin < T; begin += C) {
    const int64_t end = std::min(T, begin + C);
    loss_of_chunk(step, depth,
                  {.loss_C = loss_T.rows(begin, end),
                   .dx_CD = dx_TD.empty() ? Tensor{} : dx_TD.rows(begin, end),
                   .x_CD = x_TD.rows(begin, end),
                   .target_C = targets.target_T.rows(begin, end),
                   .weight_C = targets.weight_T.rows(begin, end)});
  }
  if (!dx_tD.empty()) rows_.sum(step, dx_tD, dx_TD);
}

void LmHead::loss_of_chunk(Step& step, int64_t depth, const LossChunk& a) const {
  StackScope scope(step.stack);
  const int64_t C = a.x_CD.dim(0), V = w_.w.dim(0), n = rows_.num_ranks();
  const Tensor logits_CV = step.alloc({C, V}, DType::f32), stats_nC3 = step.alloc({n, C, 3}, DType::f32),
               stats_C3 = stats_nC3.rows(rows_.rank(), rows_.rank() + 1).view({C, 3});
  lm_logits_block(step.stream, {.logits_CV = logits_CV,
                                .stats_C3 = stats_C3,
                                .x_CD = a.x_CD,
                                .w_VD = w_.w,
                                .target_C = a.target_C,
                                .first = first_});
  rows_.group().all_gather(step.stream, stats_nC3.view({n * C, 3}), stats_C3);
  LmLossBlock loss{.loss_C = a.loss_C,
                   .logits_CV = logits_CV,
                   .stats_nC3 = stats_nC3,
                   .x_CD = a.x_CD,
                   .w_VD = w_.w,
                   .target_C = a.target_C,
                   .weight_C = a.weight_C,
                   .scale_1 = step.batch.objective_scale_1(depth),
                   .first = first_};
  if (!a.dx_CD.empty()) {
    loss.dx_CD = a.dx_CD;
    loss.dw_VD = w_.dw;
    loss.dlogits_CV = step.alloc({C, V}, a.x_CD.dtype);
  }
  lm_loss_block(step.stream, loss);
}

}  // namespace moebius

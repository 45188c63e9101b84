#include <vector>

#include "model/attention/context_parallel_ways.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// The columns of rank r's heads, in rows that go to it or come from it.
struct HeadBlocks {
  Tensor blocks;  // [cp * T, H / cp * d], those of rank 0 first
  int64_t rows, width;
  Tensor of(int64_t r) const { return blocks.rows(r * rows, (r + 1) * rows); }
};

HeadBlocks take_blocks(Step& step, const Tensor& x_THd, int64_t cp) {
  const int64_t T = x_THd.dim(0), width = x_THd.dim(1) * x_THd.dim(2) / cp;
  return {step.alloc({cp * T, width}, x_THd.dtype), T, width};
}

Tensor as_matrix(const Tensor& x_THd) { return x_THd.view({x_THd.dim(0), x_THd.dim(1) * x_THd.dim(2)}); }

// Sends as many rows to each rank as it receives from it.
void exchange(Group& cp, Step& step, const Tensor& out, const Tensor& in) {
  const std::vector<int64_t> rows(cp.size(), in.dim(0) / cp.size());
  cp.all_to_all_v(step.stream, {.out = out, .in = in, .recv_rows = rows, .send_rows = rows});
}

}  // namespace

AllToAllContextParallel::AllToAllContextParallel(const Mesh& mesh, const ContextParallelSpec& spec)
    : cp_(mesh.group(Axis::cp)), spec_(spec) {
  for (const auto& [what, heads] : {std::pair{"query heads", spec.heads}, std::pair{"kv heads", spec.kv_heads}}) {
    MOEBIUS_CHECK(
        usage, heads % cp_.size() == 0,
        "parallel.cp_comm \"alltoall\" shares heads: parallel.cp must divide the {} of a tp rank, {} % {} must "
        "be 0; choose \"allgather\" or \"ring\", or another cp",
        what, heads, cp_.size());
  }
}

Tensor AllToAllContextParallel::to_heads(Step& step, Tensor x_THd) const {
  const int64_t cp = cp_.size(), U = cp * x_THd.dim(0);
  const Tensor sequences_UHd = step.alloc({U, x_THd.dim(1) / cp, x_THd.dim(2)}, x_THd.dtype);
  StackScope scope(step.stack);
  const HeadBlocks out = take_blocks(step, x_THd, cp), in = take_blocks(step, x_THd, cp);
  for (int64_t r = 0; r < cp; ++r) {
    copy_columns(step.stream,
                 {.to_TA = out.of(r), .from_TB = as_matrix(x_THd), .from_first = r * out.width, .count = out.width});
  }
  exchange(cp_, step, in.blocks, out.blocks);
  to_sequences(step, Pieces::of(cp_, step, x_THd.dim(0)), as_matrix(sequences_UHd), in.blocks);
  return sequences_UHd;
}

void AllToAllContextParallel::to_rows(Step& step, Tensor x_THd, Tensor x_UHd) const {
  StackScope scope(step.stack);
  const int64_t cp = cp_.size();
  const HeadBlocks out = take_blocks(step, x_THd, cp), in = take_blocks(step, x_THd, cp);
  to_ranks(step, Pieces::of(cp_, step, x_THd.dim(0)), out.blocks, as_matrix(x_UHd));
  exchange(cp_, step, in.blocks, out.blocks);
  for (int64_t r = 0; r < cp; ++r) {
    copy_columns(step.stream,
                 {.to_TA = as_matrix(x_THd), .from_TB = in.of(r), .to_first = r * in.width, .count = in.width});
  }
}

// Returns the sinks of the heads that this rank attends with.
Tensor AllToAllContextParallel::sinks_here(Tensor sink_H) const {
  const int64_t heads = spec_.heads / cp_.size();
  return sink_H.empty() ? sink_H : sink_H.rows(cp_.rank() * heads, (cp_.rank() + 1) * heads);
}

Tensor AllToAllContextParallel::starts_of_all(Step& step, int64_t rows) const {
  const Tensor starts_T = step.batch.attention_starts(rows);
  if (starts_T.empty()) return {};
  const Tensor sequences_U = step.alloc({cp_.size() * rows}, DType::i32);
  StackScope scope(step.stack);
  const Tensor ranks_U = step.alloc(sequences_U.shape, DType::i32);
  cp_.all_gather(step.stream, ranks_U, starts_T);
  to_sequences(step, Pieces::of(cp_, step, rows), sequences_U, ranks_U);
  return sequences_U;
}

void AllToAllContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const int64_t T = o_THd.dim(0), U = T * cp_.size(), heads = spec_.heads / cp_.size();
  const Tensor o_UHd = step.alloc({U, heads, o_THd.dim(2)}, o_THd.dtype);
  run_attention(step, AttentionFwd{.o_THd = o_UHd,
                                   .lse_TH = lse_TH.view({U, heads}),
                                   .q_THd = to_heads(step, in.q_THd),
                                   .k_UGd = to_heads(step, in.k_TGd),
                                   .v_UGd = to_heads(step, in.v_TGd),
                                   .doc_start_T = starts_of_all(step, T),
                                   .batch = step.batch.shape.batch,
                                   .window = spec_.window,
                                   .scale = spec_.scale});
  add_sinks(step, o_UHd, lse_TH.view({U, heads}), sinks_here(in.sink_H));
  to_rows(step, o_THd, o_UHd);
}

void AllToAllContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  const auto& [grads, do_THd, o_THd, lse_TH, in] = a;
  StackScope scope(step.stack);
  const int64_t T = o_THd.dim(0), U = T * cp_.size();
  const Qkv all{to_heads(step, in.q_THd), to_heads(step, in.k_TGd), to_heads(step, in.v_TGd)};
  const auto take_like = [&](const Tensor& x) { return step.alloc(x.shape, x.dtype); };
  const Qkv dall{take_like(all.q_THd), take_like(all.k_TGd), take_like(all.v_TGd)};
  const AttentionBwd whole{.dq_THd = dall.q_THd,
                           .dk_TGd = dall.k_TGd,
                           .dv_TGd = dall.v_TGd,
                           .do_THd = to_heads(step, do_THd),
                           .o_THd = to_heads(step, o_THd),
                           .lse_TH = lse_TH.view({U, spec_.heads / cp_.size()}),
                           .q_THd = all.q_THd,
                           .k_TGd = all.k_TGd,
                           .v_TGd = all.v_TGd,
                           .doc_start_T = starts_of_all(step, T),
                           .batch = step.batch.shape.batch,
                           .window = spec_.window,
                           .scale = spec_.scale};
  run_attention(step, whole);
  add_sinks_bwd(step, sinks_here(grads.sink_H), whole, sinks_here(in.sink_H));
  to_rows(step, grads.q_THd, dall.q_THd);
  to_rows(step, grads.k_TGd, dall.k_TGd);
  to_rows(step, grads.v_TGd, dall.v_TGd);
}

}  // namespace moebius

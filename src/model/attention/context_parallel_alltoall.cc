#include <vector>

#include "model/attention/context_parallel_impl.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// The columns of rank r's heads, in rows that are sent to it or received from it.
struct HeadBlocks {
  Tensor blocks;  // [cp * T, H / cp * d], the rows of rank 0 first
  int64_t rows, width;
  Tensor of(int64_t r) const { return blocks.rows(r * rows, (r + 1) * rows); }
};

HeadBlocks alloc_blocks(Step& step, const Tensor& x_THd, int64_t cp) {
  const int64_t T = x_THd.dim(0), width = x_THd.dim(1) * x_THd.dim(2) / cp;
  return {step.alloc({cp * T, width}, x_THd.dtype), T, width};
}

Tensor as_matrix(const Tensor& x_THd) { return x_THd.view({x_THd.dim(0), x_THd.dim(1) * x_THd.dim(2)}); }

// Sends as many rows to each rank as it receives from it.
void exchange_rows(Group& cp, Step& step, const Tensor& out, const Tensor& in) {
  const std::vector<int64_t> rows(cp.size(), in.dim(0) / cp.size());
  cp.all_to_all_v(step.stream, {.out = out, .in = in, .recv_rows = rows, .send_rows = rows});
}

}  // namespace

AllToAllContextParallel::AllToAllContextParallel(Group& cp, const ContextParallelSpec& spec, Group* outer)
    : cp_(cp), spec_(spec) {
  const int64_t n = cp_.size();
  for (const auto& [what, heads] : {std::pair{"query heads", spec.heads}, std::pair{"kv heads", spec.kv_heads}}) {
    MOEBIUS_CHECK(usage, heads % n == 0,
                  "parallel.cp_comm \"{}\" shares heads: parallel.{} must divide the {} of a tp rank, {} % {} must "
                  "be 0; choose \"allgather\" or \"ring\", or another {}",
                  outer == nullptr ? "alltoall" : "hierarchical", outer == nullptr ? "cp" : "cp_inner", what, heads, n,
                  outer == nullptr ? "cp" : "cp_inner");
  }
  ContextParallelSpec here = spec;
  here.heads = spec.heads / n;
  here.kv_heads = spec.kv_heads / n;
  here.first_head = spec.first_head + cp_.rank() * here.heads;
  if (outer == nullptr || outer->size() == 1) {
    of_heads_ = std::make_unique<NoContextParallel>(here);
  } else {
    of_heads_ = std::make_unique<RingContextParallel>(*outer, here);
  }
}

Tensor AllToAllContextParallel::to_heads(Step& step, Tensor x_THd) const {
  const int64_t cp = cp_.size(), U = cp * x_THd.dim(0);
  const Tensor sequences_UHd = step.alloc({U, x_THd.dim(1) / cp, x_THd.dim(2)}, x_THd.dtype);
  StackScope scope(step.stack);
  const HeadBlocks out = alloc_blocks(step, x_THd, cp), in = alloc_blocks(step, x_THd, cp);
  for (int64_t r = 0; r < cp; ++r) {
    copy_columns(step.stream,
                 {.to_TA = out.of(r), .from_TB = as_matrix(x_THd), .from_first = r * out.width, .count = out.width});
  }
  exchange_rows(cp_, step, in.blocks, out.blocks);
  to_sequences(step, Pieces::of(cp_, step, x_THd.dim(0)), as_matrix(sequences_UHd), in.blocks);
  return sequences_UHd;
}

void AllToAllContextParallel::to_rows(Step& step, Tensor x_THd, Tensor x_UHd) const {
  StackScope scope(step.stack);
  const int64_t cp = cp_.size();
  const HeadBlocks out = alloc_blocks(step, x_THd, cp), in = alloc_blocks(step, x_THd, cp);
  to_ranks(step, Pieces::of(cp_, step, x_THd.dim(0)), out.blocks, as_matrix(x_UHd));
  exchange_rows(cp_, step, in.blocks, out.blocks);
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

Tensor AllToAllContextParallel::starts_of_all(Step& step, Tensor starts_T) const {
  return starts_T.empty() ? starts_T : gather_sequences(step, cp_, starts_T);
}

// An expansion reads the same rows for all heads, so they are gathered.
Qkv AllToAllContextParallel::exchange(Step& step, const Qkv& in) const {
  const auto kv = [&](const Tensor& x_TGd) {
    return spec_.expansion == nullptr ? to_heads(step, x_TGd) : gather_sequences(step, cp_, x_TGd);
  };
  return {.q_THd = to_heads(step, in.q_THd),
          .k_TGd = kv(in.k_TGd),
          .v_TGd = kv(in.v_TGd),
          .sink_H = sinks_here(in.sink_H),
          .doc_start_T = starts_of_all(step, in.doc_start_T)};
}

void AllToAllContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const int64_t U = o_THd.dim(0) * cp_.size(), heads = spec_.heads / cp_.size();
  const Tensor o_UHd = step.alloc({U, heads, o_THd.dim(2)}, o_THd.dtype);
  of_heads_->forward(step, o_UHd, lse_TH.view({U, heads}), exchange(step, in));
  to_rows(step, o_THd, o_UHd);
}

void AllToAllContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  const auto& [grads, do_THd, o_THd, lse_TH, in, _] = a;
  StackScope scope(step.stack);
  compute_do(a);
  const int64_t U = o_THd.dim(0) * cp_.size();
  const Qkv all = exchange(step, in);
  const auto alloc_like = [&](const Tensor& x) { return step.alloc(x.shape, x.dtype); };
  const Qkv dall{alloc_like(all.q_THd), alloc_like(all.k_TGd), alloc_like(all.v_TGd), sinks_here(grads.sink_H)};
  of_heads_->backward(step, {.grads = dall,
                             .do_THd = to_heads(step, do_THd),
                             .o_THd = to_heads(step, o_THd),
                             .lse_TH = lse_TH.view({U, spec_.heads / cp_.size()}),
                             .in = all});
  to_rows(step, grads.q_THd, dall.q_THd);
  for (Tensor Qkv::*x : {&Qkv::k_TGd, &Qkv::v_TGd}) {
    if (spec_.expansion == nullptr) {
      to_rows(step, grads.*x, dall.*x);
    } else {
      sum_of_sequences(step, cp_, grads.*x, dall.*x);
    }
  }
}

}  // namespace moebius

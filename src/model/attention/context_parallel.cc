#include "model/attention/context_parallel.h"

#include "model/attention/context_parallel_impl.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/attention_sink.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

Tensor alloc_like(Step& step, const Tensor& x) { return step.alloc(x.shape, x.dtype); }

Tensor alloc_sequences(Step& step, const Group& cp, const Tensor& x_TGd) {
  const int64_t U = cp.size() * x_TGd.dim(0);
  if (x_TGd.shape.rank() == 1) return step.alloc({U}, x_TGd.dtype);
  return step.alloc({U, x_TGd.dim(1), x_TGd.dim(2)}, x_TGd.dtype);
}

template <class Op, class Run>
void run_with_scratch(Step& step, const GpuKernels& kernels, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(planned_scratch_bytes(op, step.stream, kernels));
  run(step.stream, op);
}

// The rows of a part belong to one sequence; otherwise they belong to all sequences of the micro-batch.
template <class Op>
void set_options(const Step& step, Op& op, const ContextParallelSpec& spec, const QueryPositions& at) {
  op.batch = at.is_part ? 1 : step.batch.shape.batch;
  op.window = spec.window;
  op.scale = spec.scale;
  op.is_part = at.is_part;
  op.q_first = at.q_first;
  op.kv_first = at.kv_first;
}

// Calls fn(rows in the order of sequences, rows in the order of ranks) for every piece of every sequence.
template <class F>
void for_each_piece(const Pieces& p, const Tensor& sequences_U, const Tensor& ranks_U, F&& fn) {
  const int64_t rank_rows = p.batch * 2 * p.length;
  for (int64_t r = 0; r < p.cp; ++r) {
    const Tensor of_rank = ranks_U.rows(r * rank_rows, (r + 1) * rank_rows);
    for (int64_t b = 0; b < p.batch; ++b) {
      for (const int half : {0, 1}) {
        const int64_t first = (b * p.count() + p.on_rank(r, half)) * p.length;
        fn(sequences_U.rows(first, first + p.length), p.here(of_rank, b, half));
      }
    }
  }
}

}  // namespace

QueryRows QueryRows::piece(const Pieces& pieces, int64_t b, int half) const {
  const auto here = [&](const Tensor& x) { return x.empty() ? x : pieces.here(x, b, half); };
  return {.q_THd = here(q_THd),
          .o_THd = here(o_THd),
          .lse_TH = here(lse_TH),
          .do_THd = here(do_THd),
          .dq_THd = here(dq_THd),
          .doc_start_T = here(doc_start_T)};
}

void compute_do(const ContextParallelBwd& a) {
  if (a.compute_do) a.compute_do();
}

QueryRows queries_of(const ContextParallelBwd& a) {
  return {.q_THd = a.in.q_THd,
          .o_THd = a.o_THd,
          .lse_TH = a.lse_TH,
          .do_THd = a.do_THd,
          .dq_THd = a.grads.q_THd,
          .doc_start_T = a.in.doc_start_T};
}

void attend(Step& step, const ContextParallelSpec& spec, const QueryRows& queries, const Kv& kv,
            const QueryPositions& at) {
  AttentionFwd a{.o_THd = queries.o_THd,
                 .lse_TH = queries.lse_TH,
                 .q_THd = queries.q_THd,
                 .k_UGd = kv.k_TGd,
                 .v_UGd = kv.v_TGd,
                 .doc_start_T = queries.doc_start_T};
  set_options(step, a, spec, at);
  if (spec.max_logits && step.batch.training)
    a.max_logit_H = spec.max_logits->rows(spec.first_head, spec.first_head + spec.heads);
  run_with_scratch(step, spec.kernels, a, attention_fwd);
}

AttentionBwd attention_bwd_of(const Step& step, const ContextParallelSpec& spec, const Kv& dkv,
                              const QueryRows& queries, const Kv& kv, const QueryPositions& at) {
  AttentionBwd a{.dq_THd = queries.dq_THd,
                 .dk_TGd = dkv.k_TGd,
                 .dv_TGd = dkv.v_TGd,
                 .do_THd = queries.do_THd,
                 .o_THd = queries.o_THd,
                 .lse_TH = queries.lse_TH,
                 .q_THd = queries.q_THd,
                 .k_TGd = kv.k_TGd,
                 .v_TGd = kv.v_TGd,
                 .doc_start_T = queries.doc_start_T,
                 .owns_gpu = spec.owns_gpu};
  set_options(step, a, spec, at);
  return a;
}

void attend_bwd(Step& step, const ContextParallelSpec& spec, const Kv& dkv, const QueryRows& queries, const Kv& kv,
                const QueryPositions& at) {
  run_with_scratch(step, spec.kernels, attention_bwd_of(step, spec, dkv, queries, kv, at), attention_bwd);
}

void add_sinks(Step& step, Tensor o_THd, Tensor lse_TH, Tensor sink_H) {
  if (!sink_H.empty()) attention_sink_fwd(step.stream, {.o_THd = o_THd, .lse_TH = lse_TH, .sink_H = sink_H});
}

void add_sinks_bwd(Step& step, Tensor dsink_H, const QueryRows& queries, Tensor sink_H) {
  if (sink_H.empty()) return;
  attention_sink_bwd(step.stream, {.dsink_H = dsink_H,
                                   .do_THd = queries.do_THd,
                                   .o_THd = queries.o_THd,
                                   .lse_TH = queries.lse_TH,
                                   .sink_H = sink_H});
}

void to_sequences(Step& step, const Pieces& pieces, Tensor sequences_U, Tensor ranks_U) {
  for_each_piece(pieces, sequences_U, ranks_U, [&](const Tensor& s, const Tensor& r) { copy(step.stream, s, r); });
}

void to_ranks(Step& step, const Pieces& pieces, Tensor ranks_U, Tensor sequences_U) {
  for_each_piece(pieces, sequences_U, ranks_U, [&](const Tensor& s, const Tensor& r) { copy(step.stream, r, s); });
}

Kv expanded(Step& step, const ContextParallelSpec& spec, const Kv& sent) {
  return spec.expansion == nullptr ? sent : spec.expansion->expand(step, sent, spec.head_range());
}

Tensor gather_sequences(Step& step, Group& cp, Tensor x_TGd) {
  const Tensor sequences_UGd = alloc_sequences(step, cp, x_TGd);
  StackScope scope(step.stack);
  const Tensor ranks_UGd = alloc_like(step, sequences_UGd);
  cp.all_gather(step.stream, ranks_UGd, x_TGd);
  to_sequences(step, Pieces::of(cp, step, x_TGd.dim(0)), sequences_UGd, ranks_UGd);
  return sequences_UGd;
}

Kv gather_beside_do(Step& step, Group& cp, const ContextParallelSpec& spec, const ContextParallelBwd& a) {
  if (!spec.overlaps) {
    compute_do(a);
    return {gather_sequences(step, cp, a.in.k_TGd), gather_sequences(step, cp, a.in.v_TGd)};
  }
  const Kv all{alloc_sequences(step, cp, a.in.k_TGd), alloc_sequences(step, cp, a.in.v_TGd)};
  StackScope scope(step.stack);
  const Kv ranks{alloc_like(step, all.k_TGd), alloc_like(step, all.v_TGd)};
  RowsInFlight k(step, cp, cp.start_all_gather(step.stream, ranks.k_TGd, a.in.k_TGd));
  RowsInFlight v(step, cp, cp.start_all_gather(step.stream, ranks.v_TGd, a.in.v_TGd));
  compute_do(a);
  v.wait();
  k.wait();
  const Pieces pieces = Pieces::of(cp, step, a.in.k_TGd.dim(0));
  to_sequences(step, pieces, all.k_TGd, ranks.k_TGd);
  to_sequences(step, pieces, all.v_TGd, ranks.v_TGd);
  return all;
}

void sum_of_sequences(Step& step, Group& cp, Tensor dx_TGd, Tensor dx_UGd) {
  StackScope scope(step.stack);
  const Tensor ranks_UGd = alloc_like(step, dx_UGd);
  to_ranks(step, Pieces::of(cp, step, dx_TGd.dim(0)), ranks_UGd, dx_UGd);
  cp.reduce_scatter_sum(step.stream, dx_TGd, ranks_UGd);
}

void NoContextParallel::forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const {
  StackScope scope(step.stack);
  const Kv kv = expanded(step, spec_, in.kv());
  attend(step, spec_, {.q_THd = in.q_THd, .o_THd = o_THd, .lse_TH = lse_TH, .doc_start_T = in.doc_start_T}, kv);
  add_sinks(step, o_THd, lse_TH, in.sink_H);
}

void NoContextParallel::backward(Step& step, const ContextParallelBwd& a) const {
  compute_do(a);
  StackScope scope(step.stack);
  const Kv sent = a.in.kv(), dsent = a.grads.kv(), kv = expanded(step, spec_, sent);
  const Kv dkv = spec_.expansion == nullptr ? dsent : Kv{alloc_like(step, kv.k_TGd), alloc_like(step, kv.v_TGd)};
  attend_bwd(step, spec_, dkv, queries_of(a), kv);
  add_sinks_bwd(step, a.grads.sink_H, queries_of(a), a.in.sink_H);
  if (spec_.expansion != nullptr)
    spec_.expansion->expand_bwd(step, {.dsent = dsent, .dkv = dkv, .sent = sent, .heads = spec_.head_range()});
}

namespace {

// REQUIRES: comm is not hierarchical, which does not work on a part of cp.
std::unique_ptr<ContextParallel> make_fixed(CpComm comm, Group& cp, const ContextParallelSpec& spec) {
  if (cp.size() == 1) return std::make_unique<NoContextParallel>(spec);
  if (comm == CpComm::ring) return std::make_unique<RingContextParallel>(cp, spec);
  if (comm == CpComm::alltoall) return std::make_unique<AllToAllContextParallel>(cp, spec);
  MOEBIUS_ASSERT(comm == CpComm::allgather);
  return std::make_unique<AllGatherContextParallel>(cp, spec);
}

// The micro-batch determines how many ranks share a sequence.
class DynamicContextParallel final : public ContextParallel {
 public:
  DynamicContextParallel(CpComm comm, const Mesh& mesh, const ContextParallelSpec& spec) {
    by_size_.push_back(std::make_unique<NoContextParallel>(spec));
    for (int64_t size = 2; size <= mesh.shape().cp; size *= 2)
      by_size_.push_back(make_fixed(comm, mesh.cp_block(size), spec));
  }
  void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const override {
    of(step).forward(step, o_THd, lse_TH, in);
  }
  void backward(Step& step, const ContextParallelBwd& a) const override { of(step).backward(step, a); }

 private:
  const ContextParallel& of(const Step& step) const {
    for (size_t i = 0; i < by_size_.size(); ++i) {
      if (int64_t{1} << i == step.batch.cp) return *by_size_[i];
    }
    return *by_size_.back();  // 0: all of cp
  }

  std::vector<std::unique_ptr<ContextParallel>> by_size_;  // [i]: of 2^i ranks
};

}  // namespace

std::unique_ptr<ContextParallel> make_context_parallel(CpComm comm, const Mesh& mesh, ContextParallelSpec spec) {
  spec.owns_gpu = mesh.shape().world() == 1;
  spec.overlaps = mesh.shape().cp_overlap;
  if (mesh.shape().cp == 1) return std::make_unique<NoContextParallel>(spec);
  if (mesh.shape().cp_dynamic) return std::make_unique<DynamicContextParallel>(comm, mesh, spec);
  if (comm != CpComm::hierarchical) return make_fixed(comm, mesh.group(Axis::cp), spec);
  return std::make_unique<AllToAllContextParallel>(mesh.group(Axis::cp_inner), spec, &mesh.group(Axis::cp_outer));
}

}  // namespace moebius

#include "model/attention/context_parallel.h"

#include "model/attention/context_parallel_ways.h"
#include "ops/attention/attention_sink.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// All rows are here.
class NoContextParallel final : public ContextParallel {
 public:
  explicit NoContextParallel(const ContextParallelSpec& spec) : spec_(spec) {}

  void forward(Step& step, Tensor o_THd, Tensor lse_TH, const Qkv& in) const override {
    run_attention(step, AttentionFwd{.o_THd = o_THd,
                                     .lse_TH = lse_TH,
                                     .q_THd = in.q_THd,
                                     .k_UGd = in.k_TGd,
                                     .v_UGd = in.v_TGd,
                                     .doc_start_T = step.batch.attention_starts(o_THd.dim(0)),
                                     .batch = step.batch.shape.batch,
                                     .window = spec_.window,
                                     .scale = spec_.scale});
    add_sinks(step, o_THd, lse_TH, in.sink_H);
  }

  void backward(Step& step, const ContextParallelBwd& a) const override {
    const auto& [grads, do_THd, o_THd, lse_TH, in] = a;
    const AttentionBwd whole{.dq_THd = grads.q_THd,
                             .dk_TGd = grads.k_TGd,
                             .dv_TGd = grads.v_TGd,
                             .do_THd = do_THd,
                             .o_THd = o_THd,
                             .lse_TH = lse_TH,
                             .q_THd = in.q_THd,
                             .k_TGd = in.k_TGd,
                             .v_TGd = in.v_TGd,
                             .doc_start_T = step.batch.attention_starts(o_THd.dim(0)),
                             .batch = step.batch.shape.batch,
                             .window = spec_.window,
                             .scale = spec_.scale};
    run_attention(step, whole);
    add_sinks_bwd(step, grads.sink_H, whole, in.sink_H);
  }

 private:
  ContextParallelSpec spec_;
};

template <class Op, class Run>
void run_with_scratch(Step& step, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  run(step.stream, op);
}

// fn(rows in the order of sequences, rows in the order of ranks) for every piece of every sequence.
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

void run_attention(Step& step, AttentionFwd a) { run_with_scratch(step, a, attention_fwd); }
void run_attention(Step& step, AttentionBwd a) { run_with_scratch(step, a, attention_bwd); }

void add_sinks(Step& step, Tensor o_THd, Tensor lse_TH, Tensor sink_H) {
  if (!sink_H.empty()) attention_sink_fwd(step.stream, {.o_THd = o_THd, .lse_TH = lse_TH, .sink_H = sink_H});
}

void add_sinks_bwd(Step& step, Tensor dsink_H, const AttentionBwd& of, Tensor sink_H) {
  if (sink_H.empty()) return;
  attention_sink_bwd(
      step.stream, {.dsink_H = dsink_H, .do_THd = of.do_THd, .o_THd = of.o_THd, .lse_TH = of.lse_TH, .sink_H = sink_H});
}

void to_sequences(Step& step, const Pieces& pieces, Tensor sequences_U, Tensor ranks_U) {
  for_each_piece(pieces, sequences_U, ranks_U, [&](const Tensor& s, const Tensor& r) { copy(step.stream, s, r); });
}

void to_ranks(Step& step, const Pieces& pieces, Tensor ranks_U, Tensor sequences_U) {
  for_each_piece(pieces, sequences_U, ranks_U, [&](const Tensor& s, const Tensor& r) { copy(step.stream, r, s); });
}

std::unique_ptr<ContextParallel> make_context_parallel(CpComm comm, const Mesh& mesh, const ContextParallelSpec& spec) {
  if (mesh.shape().cp == 1) return std::make_unique<NoContextParallel>(spec);
  switch (comm) {
    case CpComm::ring:
      return std::make_unique<RingContextParallel>(mesh, spec);
    case CpComm::alltoall:
      return std::make_unique<AllToAllContextParallel>(mesh, spec);
    case CpComm::allgather:
      break;
  }
  return std::make_unique<AllGatherContextParallel>(mesh, spec);
}

}  // namespace moebius

#include "model/moe/router/batch_route.h"

#include "model/attention/token_runs.h"
#include "ops/elementwise/elementwise.h"
#include "ops/permute/index_rows.h"

namespace moebius {
namespace {

std::vector<TokenRun> runs_of(const Step& step, const BatchShape& shape, const Mesh& mesh, int rank_of_tp_cp) {
  const int64_t tp = mesh.shape().tp;
  return token_runs(shape, mesh.shape(), {.tp = rank_of_tp_cp % tp, .cp = rank_of_tp_cp / tp}, step.batch.cp);
}

// Returns the logits of all tokens of the micro-batch, in their order.
Tensor logits_of_batch(Step& step, const Tensor& logits_TE, const BatchShape& shape, const Mesh& mesh) {
  Group& ranks = mesh.group(Axis::tp_cp);
  const int64_t T = logits_TE.dim(0), E = logits_TE.dim(1), N = T * ranks.size();
  const Tensor sorted_NE = step.alloc({N, E}, DType::f32);
  StackScope scope(step.stack);
  const Tensor by_rank_NE = step.alloc({N, E}, DType::f32);
  ranks.all_gather(step.stream, by_rank_NE, logits_TE);
  for (int q = 0; q < ranks.size(); ++q) {
    for (const TokenRun& run : runs_of(step, shape, mesh, q))
      copy(step.stream, sorted_NE.rows(run.token, run.token + run.count),
           by_rank_NE.rows(q * T + run.row, q * T + run.row + run.count));
  }
  return sorted_NE;
}

Route alloc_route(Step& step, int64_t N, int64_t E, int64_t K) {
  const auto ints = [&](Shape shape) { return step.alloc(shape, DType::i32); };
  return {.topk_TK = ints({N, K}),
          .weight_TK = step.alloc({N, K}, DType::f32),
          .counts_E = ints({E}),
          .offsets_E1 = ints({E + 1}),
          .row_token_R = ints({N * K}),
          .row_pair_R = ints({N * K}),
          .pair_row_TK = ints({N, K})};
}

}  // namespace

bool depends_on_batch(const RouteRule& rule) { return rule.capacity > 0 || rule.choice != RouteChoice::scores; }

void route_batch(Step& step, const RouteFwd& here, const BatchShape& shape, const Mesh& mesh) {
  Stream& s = step.stream;
  StackScope scope(step.stack);
  const int64_t T = here.logits_TE.dim(0), E = here.logits_TE.dim(1), K = here.route.topk_TK.dim(1);
  const int64_t N = T * mesh.group(Axis::tp_cp).size();
  const bool reports = mesh.group(Axis::tp_cp).rank() == 0;
  RouteFwd all = here;
  all.route = alloc_route(step, N, E, K);
  all.logits_TE = logits_of_batch(step, here.logits_TE, shape, mesh);
  all.scratch = step.alloc_bytes(RouteFwd::scratch_bytes(N, E, K, here.rule, s));
  if (!reports) all.load_E = all.dropped_1 = Tensor{};
  route_fwd(s, all);

  const Tensor kept_TK = here.route.pair_row_TK;
  for (const TokenRun& run : token_runs(shape, mesh.shape(), mesh.place(), step.batch.cp)) {
    const auto take = [&](const Tensor& to, const Tensor& from) {
      copy(s, to.rows(run.row, run.row + run.count), from.rows(run.token, run.token + run.count));
    };
    take(here.route.topk_TK, all.route.topk_TK);
    take(here.route.weight_TK, all.route.weight_TK);
    take(kept_TK, all.route.pair_row_TK);
  }
  index_rows(s, {.counts_e = here.route.counts_E,
                 .offsets_e1 = here.route.offsets_E1,
                 .row_token_R = here.route.row_token_R,
                 .row_pair_R = here.route.row_pair_R,
                 .pair_row_TK = here.route.pair_row_TK,
                 .scratch = step.alloc_bytes(IndexRows::scratch_bytes(T, E, s)),
                 .topk_TK = here.route.topk_TK,
                 .kept_TK = kept_TK});
}

}  // namespace moebius

#include "config/check/expert_rows_bound.h"

#include <algorithm>
#include <cmath>

namespace moebius {

int64_t bounded_rows(double factor, int64_t even, int64_t most) {
  const double rows = std::ceil(factor * static_cast<double>(even));
  return rows < static_cast<double>(most) ? static_cast<int64_t>(rows) : most;
}

int64_t even_rows(const SharedExperts& e) { return e.tokens * e.top_k * e.etp; }

int64_t max_rows(const SharedExperts& e) {
  const int64_t worst = e.etp * e.ep * e.tokens * std::min(e.top_k, e.num_experts / e.ep);
  return e.rows_factor == 0 ? worst : bounded_rows(e.rows_factor, even_rows(e), worst);
}

bool pools_rows(double budget, const SharedExperts& e) {
  if (budget == 0 || e.num_experts == 0 || e.ep * e.etp == 1) return false;
  return bounded_rows(budget, even_rows(e), max_rows(e)) < max_rows(e);
}

bool pools_expert_rows(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  const int64_t batch = std::max<int64_t>(1, s.train.micro_batch);
  const int64_t seq = s.train.seq_len > 0 ? s.train.seq_len : s.model.max_position_embeddings;
  return pools_rows(s.memory.expert_rows, {.ep = p.ep,
                                           .etp = p.etp,
                                           .num_experts = s.model.num_experts,
                                           .top_k = s.model.top_k,
                                           .tokens = batch * seq / p.cp / p.tp,
                                           .rows_factor = s.moe.rank_rows_factor});
}

}  // namespace moebius

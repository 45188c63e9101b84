#include "config/check/expert_rows_bound.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moebius {

int64_t bounded_rows(double factor, int64_t even, int64_t limit) {
  const double rows = std::ceil(factor * static_cast<double>(even));
  return rows < static_cast<double>(limit) ? static_cast<int64_t>(rows) : limit;
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

namespace {

SharedExperts experts_of(const RunSpec& s) {
  const ParallelSpec& p = s.parallel;
  const int64_t batch = std::max<int64_t>(1, s.train.micro_batch);
  const int64_t seq = s.train.seq_len > 0 ? s.train.seq_len : s.model.max_position_embeddings;
  return {.ep = p.ep,
          .etp = p.etp,
          .num_experts = s.model.num_experts,
          .top_k = s.model.top_k,
          .tokens = batch * seq / p.cp / p.tp,
          .rows_factor = s.moe.rank_rows_factor};
}

bool shares_experts(const RunSpec& s) { return s.model.num_experts > 0 && s.parallel.ep * s.parallel.etp > 1; }

// Returns the elements of memory for rows with a budget; 0: for the worst case.
double planned_elements(const RunSpec& s, double budget) {
  const SharedExperts e = experts_of(s);
  const auto rows = [&](double factor) {
    return static_cast<double>(budget == 0 ? max_rows(e) : bounded_rows(factor, even_rows(e), max_rows(e)));
  };
  const bool mtp_has_experts = s.model.is_moe_layer(s.model.num_layers);
  const int64_t layers = s.model.num_moe_layers() + (mtp_has_experts ? s.num_mtp() : 0);
  const double F = static_cast<double>(s.model.moe_intermediate_size / s.parallel.etp);
  const double D = static_cast<double>(s.model.hidden_size), L = static_cast<double>(layers);
  const bool keeps_grads = s.parallel.schedule == PipelineSchedule::zb_h1 && s.parallel.pp > 1;
  const double grads = keeps_grads ? L * 3 * F * static_cast<double>(max_rows(e)) : 0;
  return L * 2 * F * rows(budget) + ((budget == 0 ? 3 : 5) * F + D) * rows(kRowsOfALayer * budget) + grads;
}

// Returns the share of the memory of the worst case that the budget of "auto" would leave.
double planned_share(const RunSpec& s) { return planned_elements(s, kAutoExpertRows) / planned_elements(s, 0); }

constexpr double kWorthwhile = 0.75;

}  // namespace

bool pools_expert_rows(const RunSpec& s) { return pools_rows(expert_rows_budget(s), experts_of(s)); }

double expert_rows_budget(const RunSpec& s) {
  if (s.memory.expert_rows) return *s.memory.expert_rows;
  return shares_experts(s) && planned_share(s) <= kWorthwhile ? kAutoExpertRows : 0;
}

std::string expert_rows_text(const RunSpec& s) {
  if (s.memory.expert_rows || !shares_experts(s)) return "";
  return fmt::format(
      "memory.expert_rows = \"auto\" is {}: with a budget of {} the rows of experts need {:.0f} % of the memory of the "
      "worst case; \"auto\" uses this budget if that is at most {:.0f} %",
      expert_rows_budget(s), kAutoExpertRows, 100 * planned_share(s), 100 * kWorthwhile);
}

}  // namespace moebius

#include "config/dispatcher_choice.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/error.h"

namespace moebius {

namespace {

// Returns the choice for ranks that do not reach each other's memory.
DispatcherChoice choice_by_messages(const DispatcherChoiceInputs& q) {
  using enum DispatcherKind;
  if (q.ep <= q.top_k) {
    return {allgather, "allgather",
            fmt::format("chosen by \"auto\" because parallel.ep = {} is at most top-k = {}, so that it sends no more "
                        "than all-to-all",
                        q.ep, q.top_k)};
  }
  if (q.captures) {
    return {
        allgather, "allgather",
        fmt::format("chosen by \"auto\" because run.graph is on and all-to-all cannot be captured in CUDA graphs; "
                    "with run.graph = false \"auto\" is all-to-all, which sends less (parallel.ep = {}, top-k = {})",
                    q.ep, q.top_k)};
  }
  return {alltoall, "alltoall",
          fmt::format("chosen by \"auto\" because parallel.ep = {} is above top-k = {}, so that it sends less than "
                      "all-gather",
                      q.ep, q.top_k)};
}

// Returns a text such as " (0.996 rows per token with balanced routing, 1 with all-gather, 4 with all-to-all)".
std::string rows_text(const DispatcherChoiceInputs& q) {
  if (q.num_experts == 0) return "";
  const RowsOfToken rows = even_rows_of_token(q.num_experts, q.top_k, q.ep, q.etp);
  return fmt::format(" ({:.3g} rows per token with balanced routing, {:.3g} with all-gather, {:.3g} with all-to-all)",
                     rows.direct, rows.allgather, rows.alltoall);
}

const char* spoken_name(DispatcherKind kind) {
  if (kind == DispatcherKind::allgather) return "all-gather";
  return kind == DispatcherKind::alltoall ? "all-to-all" : "two-level";
}

std::string estimate_text(DispatcherKind kind, const ExchangeEstimate& e) {
  return fmt::format("{} {:.3g} ms ({:.4g} MB across nodes and {:.4g} MB inside)", spoken_name(kind), e.seconds * 1e3,
                     e.across_bytes / 1e6, e.inside_bytes / 1e6);
}

// Returns the choice for ranks that reach the memory of their nodes: the fastest by the estimates, or `by_rules`.
DispatcherChoice choice_in_nodes(const DispatcherChoiceInputs& q, const DispatcherChoice& by_rules) {
  using enum DispatcherKind;
  const ExchangeEstimates& all = *q.estimates;
  DispatcherKind fastest = by_rules.kind;
  std::string others;
  for (const DispatcherKind kind : {two_level, allgather, alltoall}) {
    if (kind == alltoall && q.captures) continue;
    if (all.of(kind).seconds < all.of(fastest).seconds) fastest = kind;
  }
  const double gain = all.of(by_rules.kind).seconds / all.of(fastest).seconds;
  const DispatcherKind kind = gain >= kMinGain ? fastest : by_rules.kind;
  for (const DispatcherKind other : {two_level, allgather, alltoall})
    if (other != kind && !(other == alltoall && q.captures))
      others += (others.empty() ? "" : ", ") + estimate_text(other, all.of(other));
  const std::string why = kind == fastest ? "is predicted to be the fastest"
                                          : fmt::format("stays, since {} is predicted to be only {:.3g} times as fast",
                                                        spoken_name(fastest), gain);
  return {.kind = kind,
          .name = name_of(kind),
          .reason = fmt::format("chosen by \"auto\" because the ranks that share experts are on {} nodes of {} "
                                "(parallel.ranks_per_node), where it {}: {} to exchange the rows of a layer and "
                                "micro-batch, against {}; rates: {}",
                                q.ep * q.etp / q.ranks_per_node, q.ranks_per_node, why,
                                estimate_text(kind, all.of(kind)), others, all.rates),
          .estimates = all};
}

DispatcherChoice automatic_choice(const DispatcherChoiceInputs& q) {
  if (q.peers.all) {
    return {DispatcherKind::direct, "direct",
            fmt::format("chosen by \"auto\" because {}: a token is written once to each rank that has any of its "
                        "experts, which sends the least{}",
                        q.peers.why, rows_text(q))};
  }
  DispatcherChoice choice = choice_by_messages(q);
  if (q.peers.in_nodes && q.estimates) choice = choice_in_nodes(q, choice);
  if (!q.peers.why.empty() && choice.kind != DispatcherKind::two_level)
    choice.reason += fmt::format("; direct would send the least, but {}", q.peers.why);
  return choice;
}

// Returns the mean over tokens t of the share of parts with any of the experts (t K + k) mod E. The tokens repeat after
// E / gcd(E, K) of them.
double chance_of_neighbours(int64_t num_experts, int64_t top_k, int64_t parts) {
  const int64_t period = num_experts / std::gcd(num_experts, top_k), of_part = num_experts / parts;
  int64_t hits = 0;
  for (int64_t t = 0; t < period; ++t) {
    std::set<int64_t> hit;
    for (int64_t k = 0; k < top_k; ++k) hit.insert((t * top_k + k) % num_experts / of_part);
    hits += std::ssize(hit);
  }
  return static_cast<double>(hits) / static_cast<double>(period * parts);
}

}  // namespace

double chance_of_part(int64_t num_experts, int64_t top_k, int64_t parts, bool round_robin) {
  if (round_robin) return chance_of_neighbours(num_experts, top_k, parts);
  const double E = static_cast<double>(num_experts), elsewhere = E - E / static_cast<double>(parts);
  double misses = 1;  // the probability that none of a token's experts is in the part
  for (int64_t k = 0; k < top_k; ++k)
    misses *= std::max(0.0, elsewhere - static_cast<double>(k)) / (E - static_cast<double>(k));
  return 1 - misses;
}

bool sends_all_tokens(int64_t num_experts, int64_t top_k, int64_t ep, int64_t num_groups, bool round_robin) {
  // Contiguous rows are sent at 1.02 to 1.15 times the rate of others (two H200,
  // docs/measurements/performance/several-gpus.md).
  constexpr double kMinChance = 0.98;
  return ep > 1 && ep <= top_k && num_groups <= 1 && chance_of_part(num_experts, top_k, ep, round_robin) >= kMinChance;
}

RowsOfToken even_rows_of_token(int64_t num_experts, int64_t top_k, int64_t ep, int64_t etp) {
  const double W = static_cast<double>(ep * etp);
  return {.allgather = W - 1,
          .alltoall = static_cast<double>(top_k * etp) * (W - 1) / W,
          .direct = (W - 1) * chance_of_part(num_experts, top_k, ep)};
}

const ExchangeEstimate& ExchangeEstimates::of(DispatcherKind kind) const {
  if (kind == DispatcherKind::allgather) return allgather;
  return kind == DispatcherKind::alltoall ? alltoall : two_level;
}

bool has_nodes(int64_t ep, int64_t etp, int64_t ranks_per_node) {
  const int64_t W = ep * etp;
  return W % ranks_per_node == 0 && ranks_per_node % etp == 0 && W > ranks_per_node;
}

void check_nodes(int64_t ep, int64_t etp, int64_t ranks_per_node, const std::string& origin) {
  MOEBIUS_CHECK(
      usage, has_nodes(ep, etp, ranks_per_node),
      "parallel.dispatcher = \"two_level\": the ep * etp = {} * {} ranks that share experts must be on two "
      "or more whole nodes of parallel.ranks_per_node = {} ranks, and each ep rank on one node; set ranks_per_node "
      "to a divisor of {} that etp divides, or set dispatcher = \"direct\" where all of them are on one "
      "machine{}",
      ep, etp, ranks_per_node, ep * etp, origin);
}

DispatcherChoice resolve_dispatcher(const DispatcherChoiceInputs& q) {
  if (!q.has_moe_layers) return {q.asked, "none", "the model has no MoE layer"};
  if (q.ep * q.etp == 1) return {q.asked, "local", "each rank holds all experts of its layers (parallel.ep * etp = 1)"};
  if (q.asked == DispatcherKind::automatic) return automatic_choice(q);
  MOEBIUS_CHECK(usage, q.asked != DispatcherKind::alltoall || !q.captures,
                "parallel.dispatcher = \"alltoall\" reads its counts on the host, so its steps cannot be captured in "
                "CUDA graphs; set run.graph = false, or dispatcher = \"allgather\"{}",
                q.origin);
  if (q.asked == DispatcherKind::two_level) check_nodes(q.ep, q.etp, q.ranks_per_node, q.origin);
  std::string reason = "parallel.dispatcher asks for it";
  if (q.asked == DispatcherKind::direct && !q.peers.all && !q.peers.why.empty())
    reason += fmt::format("; a run would refuse it, because {}", q.peers.why);
  return {q.asked, name_of(q.asked), reason};
}

PeerReach reach_on_machines(const ParallelSpec& p, int64_t ranks, int64_t ranks_per_machine,
                            const std::string& source) {
  const int64_t sharing = p.ep * p.etp;
  PeerReach peers{.all = ranks <= ranks_per_machine || ranks_per_machine % sharing == 0};
  peers.why = fmt::format("the {} ranks that share experts are {} one machine ({})", sharing,
                          peers.all ? "on" : "not on", source);
  peers.in_nodes = !peers.all && has_nodes(p.ep, p.etp, p.ranks_per_node) && ranks_per_machine % p.ranks_per_node == 0;
  return peers;
}

DispatcherChoiceInputs dispatcher_inputs(const RunSpec& run, const PeerReach& peers) {
  const auto from = run.provenance.find("parallel.dispatcher");
  return {.asked = run.parallel.dispatcher,
          .ep = run.parallel.ep,
          .etp = run.parallel.etp,
          .top_k = run.model.top_k,
          .num_experts = run.model.num_experts,
          .has_moe_layers = run.model.num_moe_layers() > 0,
          .captures = run.device == DeviceKind::cuda && run.graph,
          .ranks_per_node = run.parallel.ranks_per_node,
          .peers = peers,
          .origin = from == run.provenance.end() ? "" : fmt::format(" [{}]", from->second)};
}

DispatcherChoice resolve_dispatcher(const RunSpec& run, const PeerReach& peers) {
  return resolve_dispatcher(dispatcher_inputs(run, peers));
}

std::string unused_machine_text(const RunSpec& run, const DispatcherChoice& choice) {
  if (run.machine.empty() || choice.estimates) return "";
  return fmt::format(
      "--machine {}: its rates have no effect here, since the dispatcher is not chosen by predicted times",
      run.machine);
}

const char* name_of(DispatcherKind kind) {
  switch (kind) {
    case DispatcherKind::automatic:
      return "auto";
    case DispatcherKind::allgather:
      return "allgather";
    case DispatcherKind::alltoall:
      return "alltoall";
    case DispatcherKind::direct:
      return "direct";
    case DispatcherKind::two_level:
      break;
  }
  return "two_level";
}

DispatcherKind dispatcher_kind(const std::string& name, const std::string& who) {
  for (const DispatcherKind kind : kDispatcherKinds)
    if (name == name_of(kind)) return kind;
  MOEBIUS_FAIL(usage, "{}: expected auto, allgather, alltoall, direct or two_level; got {}", who, name);
}

}  // namespace moebius

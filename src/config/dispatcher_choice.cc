#include "config/dispatcher_choice.h"

#include "core/error.h"

namespace moebius {

namespace {

// The choice of ranks that do not reach each other's memory.
DispatcherChoice choice_by_messages(const DispatcherQuestion& q) {
  using enum DispatcherKind;
  if (q.ep <= q.top_k) {
    return {allgather, "allgather",
            fmt::format("\"auto\" takes it because parallel.ep = {} is at most top-k = {}, so that it sends no more "
                        "than all-to-all",
                        q.ep, q.top_k)};
  }
  if (q.captures) {
    return {
        allgather, "allgather",
        fmt::format("\"auto\" takes it because run.graph is on and all-to-all cannot be captured in CUDA graphs; "
                    "with run.graph = false \"auto\" is all-to-all, which sends less (parallel.ep = {}, top-k = {})",
                    q.ep, q.top_k)};
  }
  return {alltoall, "alltoall",
          fmt::format("\"auto\" takes it because parallel.ep = {} is above top-k = {}, so that it sends less than "
                      "all-gather",
                      q.ep, q.top_k)};
}

// " (0.996 rows of a token, 1 with all-gather, 4 with all-to-all)"
std::string rows_text(const DispatcherQuestion& q) {
  if (q.num_experts == 0) return "";
  const RowsOfToken rows = even_rows_of_token(q.num_experts, q.top_k, q.ep, q.etp);
  return fmt::format(" ({:.3g} rows of a token with even experts, {:.3g} with all-gather, {:.3g} with all-to-all)",
                     rows.direct, rows.allgather, rows.alltoall);
}

DispatcherChoice automatic_choice(const DispatcherQuestion& q) {
  if (q.peers.all) {
    return {DispatcherKind::direct, "direct",
            fmt::format("\"auto\" takes it because {}: a token is written once to each rank that has any of its "
                        "experts, which sends the least{}",
                        q.peers.why, rows_text(q))};
  }
  DispatcherChoice choice = choice_by_messages(q);
  if (!q.peers.why.empty()) choice.reason += fmt::format("; direct would send the least, but {}", q.peers.why);
  return choice;
}

}  // namespace

RowsOfToken even_rows_of_token(int64_t num_experts, int64_t top_k, int64_t ep, int64_t etp) {
  const double W = static_cast<double>(ep * etp), E = static_cast<double>(num_experts),
               elsewhere = E - E / static_cast<double>(ep);
  double misses = 1;  // the probability that none of a token's experts is on a given rank
  for (int64_t k = 0; k < top_k; ++k) misses *= (elsewhere - static_cast<double>(k)) / (E - static_cast<double>(k));
  return {
      .allgather = W - 1, .alltoall = static_cast<double>(top_k * etp) * (W - 1) / W, .direct = (W - 1) * (1 - misses)};
}

DispatcherChoice resolve_dispatcher(const DispatcherQuestion& q) {
  if (!q.has_moe_layers) return {q.asked, "none", "the model has no MoE layer"};
  if (q.ep * q.etp == 1) return {q.asked, "local", "each rank holds all experts of its layers (parallel.ep * etp = 1)"};
  if (q.asked == DispatcherKind::automatic) return automatic_choice(q);
  MOEBIUS_CHECK(usage, q.asked != DispatcherKind::alltoall || !q.captures,
                "parallel.dispatcher = \"alltoall\" reads its counts on the host, so its steps cannot be captured in "
                "CUDA graphs; set run.graph = false, or dispatcher = \"allgather\"{}",
                q.origin);
  return {q.asked, name_of(q.asked), "parallel.dispatcher asks for it"};
}

DispatcherChoice resolve_dispatcher(const RunSpec& run, const PeerReach& peers) {
  const auto from = run.provenance.find("parallel.dispatcher");
  return resolve_dispatcher({.asked = run.parallel.dispatcher,
                             .ep = run.parallel.ep,
                             .etp = run.parallel.etp,
                             .top_k = run.model.top_k,
                             .num_experts = run.model.num_experts,
                             .has_moe_layers = run.model.num_moe_layers() > 0,
                             .captures = run.device == DeviceKind::cuda && run.graph,
                             .peers = peers,
                             .origin = from == run.provenance.end() ? "" : fmt::format(" [{}]", from->second)});
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
      break;
  }
  return "direct";
}

DispatcherKind dispatcher_kind(const std::string& name, const std::string& who) {
  for (const DispatcherKind kind : kDispatcherKinds)
    if (name == name_of(kind)) return kind;
  MOEBIUS_FAIL(usage, "{}: expected auto, allgather, alltoall or direct; got {}", who, name);
}

}  // namespace moebius

#include "plan/cost/row_exchange.h"

#include <algorithm>

#include "comm/group_cost.h"
#include "config/dispatcher_choice.h"
#include "model/moe/dispatcher_cost.h"
#include "model/moe/wire_rows.h"

namespace moebius {
namespace {

bool is_own_direct(const TimeContext& c) { return is_own(c) && c.spec.dispatcher == DispatcherKind::direct; }
bool is_own_two_level(const TimeContext& c) { return is_own(c) && c.spec.dispatcher == DispatcherKind::two_level; }

double tokens_of(const TimeContext& c) {
  return static_cast<double>(rows_between_projections(c.spec.shape, c.spec.mesh));
}

double row_bytes(const TimeContext& c, RowDirection direction) {
  const int64_t D = c.spec.model.hidden_size;
  const DType compute = c.spec.precision.compute;
  if (direction == RowDirection::back) return static_cast<double>(D * size_of(compute));
  return static_cast<double>(WireRows(c.spec.precision, compute, D).num_bytes());
}

double inside_rate(const TimeContext& c) {
  return c.machine.inside_gb_s * 1e9 * c.machine.of(c.assume.system)[static_cast<size_t>(Share::inside)];
}

double across_rate(const TimeContext& c) {
  return c.machine.across_gb_s * 1e9 * c.machine.of(c.assume.system)[static_cast<size_t>(Share::across)];
}

double busiest_rank(const TimeContext& c) {
  return c.assume.load.busiest_rank(c.spec.model.num_experts, c.spec.mesh.ep);
}

// Rows that a rank writes to others, each of a token and a rank that has some of its experts.
double direct_rows(const TimeContext& c, const DispatchShape& s) {
  if (c.spec.model.n_group <= 1 || s.round_robin || s.sends_all) return even_direct_rows(s);
  const double others = static_cast<double>(s.ep - 1);
  return others > 0
             ? s.T * static_cast<double>(s.W - 1) * units_of_token(c.spec.model, static_cast<double>(s.ep)) / others
             : s.T * static_cast<double>(s.W - 1);
}

DispatchShape shape_of(const TimeContext& c, RowDirection direction) {
  const MeshShape& mesh = c.spec.mesh;
  const ModelSpec& m = c.spec.model;
  return {.T = tokens_of(c),
          .D = static_cast<double>(m.hidden_size),
          .K = static_cast<double>(m.top_k),
          .E = static_cast<double>(m.num_experts),
          .W = mesh.ep * mesh.etp,
          .ep = mesh.ep,
          .node = mesh.ranks_per_node,
          .element_bytes = row_bytes(c, direction) / static_cast<double>(m.hidden_size),
          .round_robin = c.spec.balance.force_balance,
          .sends_all = is_own_direct(c) &&
                       sends_all_tokens(m.num_experts, m.top_k, mesh.ep, m.n_group, c.spec.balance.force_balance)};
}

// Returns the engine's writes to windows of other ranks in each call: all rows of direct, and for two-level the rows
// inside a node, whose messages across have been counted.
DispatchCost written(const TimeContext& c, RowDirection direction) {
  const DispatchShape s = shape_of(c, direction);
  if (is_own_direct(c)) return direct_dispatch_cost(s, direct_rows(c, s));
  const double inside = static_cast<double>(s.W - s.W / s.node) * even_rows_of_part(s, s.ep);
  return two_level_dispatch_cost(s, 0, inside).inside;
}

// Returns the bytes of the indices of tokens by which experts draw with nvfp4 (Dispatcher::dispatch_index). They are
// written to windows in place of routes, which are the experts and weights of a token on one rank.
double written_index_bytes(const TimeContext& c) {
  if (c.spec.precision.recipe != PrecisionRecipe::nvfp4) return 0;
  const DispatchShape s = shape_of(c, RowDirection::to_experts);
  const double rows =
      is_own_direct(c) ? direct_rows(c, s) : static_cast<double>(s.W - s.W / s.node) * even_rows_of_part(s, s.ep);
  constexpr double kRouteBytes = 8;
  return rows * kRouteBytes * std::min(s.K, s.E / static_cast<double>(s.ep));
}

// Where every token goes to all ranks, each of them sends the same bytes.
RowsSent written_bytes(const TimeContext& c, double bytes) {
  const RankSpan span =
      is_own_two_level(c) ? RankSpan{c.spec.mesh.ranks_per_node, 1} : span_of(c.spec.mesh, expert_axis(c.spec.mesh));
  if (span.size <= 1) return {};
  const bool is_inside = span.local(c.machine) == span.size;
  const double sent = (shape_of(c, RowDirection::to_experts).sends_all ? 1 : busiest_rank(c)) * bytes;
  const double seconds = is_inside ? c.machine.inside_us * 1e-6 + sent / inside_rate(c)
                                   : group_seconds(c, span, GroupCall::all_to_all, sent);
  return {.seconds = seconds, .wire_bytes = bytes, .outgoing_bytes = bytes};
}

RowsSent of_allgather(const TimeContext& c, const RankSpan& span, double row) {
  const GroupCost cost = all_gather_cost(static_cast<double>(span.size) * tokens_of(c) * row, span.size);
  return {.seconds = group_seconds(c, span, GroupCall::all_gather, cost.wire_bytes),
          .wire_bytes = cost.wire_bytes,
          .outgoing_bytes = cost.wire_bytes};
}

RowsSent of_alltoall(const TimeContext& c, const RankSpan& span, double row) {
  const double n = static_cast<double>(span.size);
  const double pairs = tokens_of(c) * static_cast<double>(c.spec.model.top_k * c.spec.mesh.etp);
  const double bytes = pairs * row * (n - 1) / n;
  return {.seconds = busiest_rank(c) * group_seconds(c, span, GroupCall::all_to_all, bytes),
          .wire_bytes = bytes,
          .outgoing_bytes = bytes};
}

// Once to each rank inside, where it is handed on; once to each domain across.
RowsSent of_one_sided(const TimeContext& c, const RankSpan& span, double row) {
  const double n = static_cast<double>(span.size), domains = n / static_cast<double>(span.local(c.machine));
  const double inside = tokens_of(c) * row * units_of_token(c.spec.model, n);
  const double across = tokens_of(c) * row * units_of_token(c.spec.model, domains);
  const double seconds = std::max(inside / inside_rate(c), across / across_rate(c));
  const double latency = (domains > 1 ? c.machine.across_us : c.machine.inside_us) * 1e-6;
  return {.seconds = busiest_rank(c) * seconds + latency,
          .wire_bytes = domains > 1 ? across : inside,
          .outgoing_bytes = inside};
}

// Returns the traffic of other software, or of an assumed dispatcher. The groups counted that of the engine's own.
RowsSent both_ways(const TimeContext& c) {
  if (is_own(c)) return {};
  RowsSent sent = rows_sent(c, RowDirection::to_experts);
  return sent += rows_sent(c, RowDirection::back);
}

}  // namespace

double memory_rate(const TimeContext& c) {
  return c.machine.memory_tb_s * 1e12 * c.machine.of(c.assume.system)[static_cast<size_t>(Share::memory)];
}

bool is_expert_axis(Axis axis) { return axis == Axis::ep || axis == Axis::etp_ep; }

Axis expert_axis(const MeshShape& mesh) { return mesh.etp > 1 ? Axis::etp_ep : Axis::ep; }

void check_nodes_of_machine(const TimeContext& c) {
  if (!is_own_two_level(c) || c.spec.mesh.ep * c.spec.mesh.etp == 1) return;
  MOEBIUS_CHECK(usage, static_cast<double>(c.spec.mesh.ranks_per_node) <= c.machine.domain_ranks,
                "plan: the nodes of parallel.dispatcher = \"two_level\" have parallel.ranks_per_node = {} ranks, which "
                "write to each other's memory; on the machine {} a host has {} ranks of {} threads (rank.threads / "
                "run.threads); set ranks_per_node or run.threads lower",
                c.spec.mesh.ranks_per_node, c.machine.name, c.machine.domain_ranks, c.spec.threads);
}

bool is_own(const TimeContext& c) {
  return c.assume.dispatcher == PlanDispatcher::from_recipe && c.assume.system == PlanSystem::moebius;
}

bool writes_to_windows(const TimeContext& c) { return is_own_direct(c) || is_own_two_level(c); }

RankSpan span_of_messages(const TimeContext& c, const SentWork& sent) {
  const MeshShape& mesh = c.spec.mesh;
  if (is_expert_axis(sent.axis) && is_own_two_level(c)) return {mesh.nodes_of_experts(), mesh.ranks_per_node};
  RankSpan span = span_of(mesh, sent.axis);
  span.sums = c.spec.precision.compute;  // rows and their gradients
  return span;
}

PlanDispatcher dispatcher_of(const TimeContext& c) {
  if (writes_to_windows(c)) return PlanDispatcher::direct;
  return c.assume.dispatcher == PlanDispatcher::from_recipe ? PlanDispatcher::alltoall : c.assume.dispatcher;
}

RowsSent& RowsSent::operator+=(const RowsSent& o) {
  seconds += o.seconds;
  wire_bytes += o.wire_bytes;
  messages += o.messages;
  outgoing_bytes += o.outgoing_bytes;
  return *this;
}

RowsSent rows_sent(const TimeContext& c, RowDirection direction) {
  const RankSpan span = span_of(c.spec.mesh, expert_axis(c.spec.mesh));
  if (span.size == 1) return {};
  const double row = row_bytes(c, direction);
  RowsSent sent;
  if (dispatcher_of(c) == PlanDispatcher::allgather)
    sent = of_allgather(c, span, row);
  else if (dispatcher_of(c) == PlanDispatcher::alltoall)
    sent = of_alltoall(c, span, row);
  else
    sent = of_one_sided(c, span, row);
  sent.messages = group_messages(c, span, GroupCall::all_to_all);
  return sent;
}

RowsSent forward_rows_sent(const TimeContext& c) {
  if (!writes_to_windows(c)) return both_ways(c);
  const DispatchCost there = written(c, RowDirection::to_experts), back = written(c, RowDirection::back);
  RowsSent sent = written_bytes(c, there.announce.wire_bytes + there.dispatch.wire_bytes);
  if (const double index = written_index_bytes(c); index > 0) sent += written_bytes(c, index);
  return sent += written_bytes(c, back.combine.wire_bytes);
}

RowsSent backward_rows_sent(const TimeContext& c) {
  if (!writes_to_windows(c)) return both_ways(c);
  const DispatchCost there = written(c, RowDirection::to_experts), back = written(c, RowDirection::back);
  RowsSent sent = written_bytes(c, there.dispatch.wire_bytes);
  sent += written_bytes(c, there.combine_bwd.wire_bytes);
  return sent += written_bytes(c, back.dispatch_bwd.wire_bytes);
}

}  // namespace moebius

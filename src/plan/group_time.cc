// Times and messages of collectives.
#include <algorithm>
#include <vector>

#include "comm/collective_levels.h"
#include "comm/group_cost.h"
#include "plan/cost/row_exchange.h"
#include "plan/work_time.h"

namespace moebius {
namespace {

bool sends_to_each(const TimeContext& c) { return c.machine.is_gpu && c.assume.system == PlanSystem::moebius; }

bool adds_by_ranks(const TimeContext& c, GroupCall call) {
  return sends_to_each(c) && c.spec.sums == GpuSums::ranks &&
         (call == GroupCall::all_reduce || call == GroupCall::reduce_scatter);
}

// Returns whether each rank sends a message to every other rank. Groups of NCCL do so to gather among few ranks
// (comm/gpu/nccl/group.cc); NCCL's own collectives are rings.
bool is_one_exchange(const TimeContext& c, const RankSpan& span, GroupCall call) {
  if (call == GroupCall::all_to_all || call == GroupCall::send) return true;
  return call == GroupCall::all_gather && sends_to_each(c) && c.spec.sums == GpuSums::ranks &&
         span.size <= CollectiveLevels::kMaxRadix;
}

CollectiveLevels levels_of(const RankSpan& span) { return CollectiveLevels(static_cast<int>(span.size), span.node); }

// An exchange of a level: its ranks, and the bytes that each of them sends.
struct LevelExchange {
  RankSpan members;
  double wire_bytes = 0;
};

// Returns the exchanges of a sum in rank order. The all-reduces of a step add f32 or f64.
std::vector<LevelExchange> exchanges_of_sum(const RankSpan& span, GroupCall call, double wire_bytes) {
  const CollectiveLevels levels = levels_of(span);
  const bool is_bf16 = call == GroupCall::reduce_scatter && span.sums == DType::bf16;
  std::vector<LevelExchange> exchanges;
  double all = 0;
  int64_t stride = span.stride;
  for (int l = 0; l < levels.count(); ++l) {
    const double f32_times = is_bf16 && l > 0 ? 2 : 1;  // sums between levels are f32
    const double part = f32_times * levels.width(l) * (levels.radix(l) - 1);
    exchanges.push_back({.members = {levels.radix(l), stride}, .wire_bytes = part});
    all += part;
    stride *= levels.radix(l);
  }
  for (LevelExchange& exchange : exchanges) exchange.wire_bytes *= wire_bytes / all;
  return exchanges;
}

// Returns the seconds of the sums of a call, which read the parts of all ranks of a level and write one.
double sum_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes) {
  if (!adds_by_ranks(c, call)) return 0;
  double bytes = 0;
  for (const auto& [members, sent] : exchanges_of_sum(span, call, wire_bytes)) {
    const double r = static_cast<double>(members.size);
    bytes += (r + 1) * sent / (r - 1) / (call == GroupCall::all_reduce ? 2 : 1);
  }
  return bytes / memory_rate(c);
}

// Bytes per second of the links of a rank, inside a domain and between domains.
struct LinkRates {
  double inside, across;
};

LinkRates rates_of(const TimeContext& c) {
  const Shares& shares = c.machine.of(c.assume.system);
  return {.inside = c.machine.inside_gb_s * 1e9 * shares[static_cast<size_t>(Share::inside)],
          .across = c.machine.across_gb_s * 1e9 * shares[static_cast<size_t>(Share::across)]};
}

// Returns the seconds of messages from each rank to every other one.
double exchange_seconds(const TimeContext& c, const RankSpan& span, double wire_bytes) {
  const LinkRates rates = rates_of(c);
  const int64_t local = span.local(c.machine);
  if (local == span.size) {
    const double over_links = sends_to_each(c) ? message_time_over_links(span.size) : 1;
    return c.machine.inside_us * 1e-6 + wire_bytes * over_links / rates.inside;
  }
  const double far = static_cast<double>(span.size - local) / static_cast<double>(span.size - 1);
  return c.machine.across_us * 1e-6 + std::max(wire_bytes * far / rates.across, wire_bytes * (1 - far) / rates.inside);
}

}  // namespace

double memory_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes) {
  if (span.size <= 1 || !c.machine.is_gpu) return 0;
  return 2 * wire_bytes / memory_rate(c) + sum_seconds(c, span, call, wire_bytes);
}

double group_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes) {
  if (span.size <= 1) return 0;
  if (adds_by_ranks(c, call)) {
    double seconds = sum_seconds(c, span, call, wire_bytes);
    for (const auto& [members, sent] : exchanges_of_sum(span, call, wire_bytes))
      seconds += exchange_seconds(c, members, sent);
    return seconds;
  }
  const int64_t local = span.local(c.machine);
  if (local == span.size || is_one_exchange(c, span, call)) return exchange_seconds(c, span, wire_bytes);
  // A ring leaves each domain once. These bytes are divided among the links of the domain's ranks.
  const LinkRates rates = rates_of(c);
  return c.machine.across_us * 1e-6 + wire_bytes / std::min(rates.inside, rates.across * static_cast<double>(local));
}

double group_messages(const TimeContext& c, const RankSpan& span, GroupCall call) {
  if (span.size <= 1) return 0;
  if (call == GroupCall::reduce_scatter && adds_by_ranks(c, call)) {
    // At level 0 a message has the part of one rank.
    const CollectiveLevels levels = levels_of(span);
    return static_cast<double>(levels.messages() + (levels.radix(0) - 1) * (levels.width(0) - 1));
  }
  switch (call) {
    case GroupCall::all_gather:
      if (is_one_exchange(c, span, call)) return static_cast<double>(span.size - 1);
      return static_cast<double>(all_gather_cost(0, span.size, span.node).messages);
    case GroupCall::reduce_scatter:
      return static_cast<double>(reduce_scatter_cost(0, span.size, DType::f32, span.node).messages);
    case GroupCall::all_reduce:
      return static_cast<double>(all_reduce_cost(0, span.size, DType::f32, span.node).messages);
    case GroupCall::all_to_all:
      return static_cast<double>(all_to_all_cost(0, span.size).messages);
    case GroupCall::send:
      return static_cast<double>(send_cost(0).messages);
  }
  MOEBIUS_FAIL(internal, "group_messages: a call that is not known");
}

}  // namespace moebius

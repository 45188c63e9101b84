// Times and messages of collectives.
#include <algorithm>

#include "comm/collective_levels.h"
#include "comm/group_cost.h"
#include "plan/cost/row_exchange.h"
#include "plan/work_time.h"

namespace moebius {
namespace {

bool sends_to_each(const TimeContext& c) { return c.machine.is_gpu && c.assume.system == PlanSystem::moebius; }

// Returns whether each rank sends a message to every other rank. Groups of NCCL do so to add in the order of the ranks,
// and to gather among few ranks (comm/gpu/nccl/group.cc); NCCL's own collectives are rings.
bool is_one_exchange(const TimeContext& c, const RankSpan& span, GroupCall call) {
  if (call == GroupCall::all_to_all || call == GroupCall::send) return true;
  if (!sends_to_each(c) || c.spec.sums != GpuSums::ranks) return false;
  return call != GroupCall::all_gather || span.size <= CollectiveLevels::kMaxRadix;
}

// Returns the seconds of a sum over ranks in their order, which reads n parts and writes one.
double sum_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes) {
  if (!sends_to_each(c) || c.spec.sums != GpuSums::ranks) return 0;
  const bool is_all_reduce = call == GroupCall::all_reduce;
  if (!is_all_reduce && call != GroupCall::reduce_scatter) return 0;
  const double n = static_cast<double>(span.size), part = wire_bytes / (n - 1) / (is_all_reduce ? 2 : 1);
  return (n + 1) * part / memory_rate(c);
}

}  // namespace

double memory_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes) {
  if (span.size <= 1 || !c.machine.is_gpu) return 0;
  return 2 * wire_bytes / memory_rate(c) + sum_seconds(c, span, call, wire_bytes);
}

double group_seconds(const TimeContext& c, const RankSpan& span, GroupCall call, double wire_bytes) {
  if (span.size <= 1) return 0;
  const Shares& shares = c.machine.of(c.assume.system);
  const double inside = c.machine.inside_gb_s * 1e9 * shares[static_cast<size_t>(Share::inside)];
  const double across = c.machine.across_gb_s * 1e9 * shares[static_cast<size_t>(Share::across)];
  const int64_t local = span.local(c.machine);
  const double sum = sum_seconds(c, span, call, wire_bytes);
  if (local == span.size) {
    const double over_links = sends_to_each(c) ? message_time_over_links(span.size) : 1;
    return c.machine.inside_us * 1e-6 + wire_bytes * over_links / inside + sum;
  }
  const double latency = c.machine.across_us * 1e-6;
  if (is_one_exchange(c, span, call)) {
    const double far = static_cast<double>(span.size - local) / static_cast<double>(span.size - 1);
    return latency + std::max(wire_bytes * far / across, wire_bytes * (1 - far) / inside) + sum;
  }
  // A ring crosses between domains once, on the link of each of the domain's ranks.
  return latency + wire_bytes / std::min(inside, across * static_cast<double>(local)) + sum;
}

double group_messages(const TimeContext& c, const RankSpan& span, GroupCall call) {
  if (span.size <= 1) return 0;
  if (call != GroupCall::send && is_one_exchange(c, span, call))
    return static_cast<double>((span.size - 1) * (call == GroupCall::all_reduce ? 2 : 1));
  switch (call) {
    case GroupCall::all_gather:
      return static_cast<double>(all_gather_cost(0, span.size).messages);
    case GroupCall::reduce_scatter:
      return static_cast<double>(reduce_scatter_cost(0, span.size).messages);
    case GroupCall::all_reduce:
      return static_cast<double>(all_reduce_cost(0, span.size).messages);
    case GroupCall::all_to_all:
      return static_cast<double>(all_to_all_cost(0, span.size).messages);
    case GroupCall::send:
      return static_cast<double>(send_cost(0).messages);
  }
  MOEBIUS_FAIL(internal, "group_messages: a call that is not known");
}

}  // namespace moebius

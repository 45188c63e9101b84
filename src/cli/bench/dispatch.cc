#include "cli/bench/dispatch.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "cli/bench/ranks.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/ranks.h"

namespace moebius {
namespace {

std::string where(const DispatchBenchSpec& spec, const std::string& launched) {
  return fmt::format("{}; {}, {} threads each", machine_line(this_machine()), launched, spec.threads);
}

std::string routing_text(const BenchRouting& routing) {
  switch (routing.kind) {
    case BenchRouting::Kind::balanced:
      return "balanced";
    case BenchRouting::Kind::zipf:
      return fmt::format("zipf {}", routing.exponent);
    case BenchRouting::Kind::uneven:
      return "uneven";
  }
  MOEBIUS_ASSERT(!"unknown routing");
}

// ", 0.83 of its 1234 bytes in use"
std::string padding_text(const DispatchRate& rate) {
  if (rate.useful_bytes == rate.wire_bytes) return "";
  return fmt::format(", {:.3f} of its {:.0f} bytes in use", rate.useful_bytes / rate.wire_bytes, rate.wire_bytes);
}

void print_as_json(const DispatchBench& r, const DispatchBenchSpec& spec, const std::string& launched) {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const DispatchLine& l : r.lines)
    lines.push_back({{"name", l.name},
                     {"median_ms", l.median_ms},
                     {"sent_bytes", l.sent_bytes},
                     {"route_bytes", l.route_bytes},
                     {"expected_bytes", l.expected_bytes},
                     {"logical_bytes", l.logical_bytes}});
  if (r.nodes > 1) {
    for (size_t i = 0; i < r.lines.size(); ++i)
      lines[i].update({{"across_bytes", r.lines[i].across_bytes},
                       {"across_route_bytes", r.lines[i].across_route_bytes},
                       {"inside_bytes", r.lines[i].inside_bytes()}});
  }
  nlohmann::ordered_json json{{"bench", "dispatch"},
                              {"machine", where(spec, launched)},
                              {"shape", r.shape.name},
                              {"routing", routing_text(spec.routing)},
                              {"ranks", r.ranks},
                              {"ep", r.ep},
                              {"etp", r.etp},
                              {"nodes", r.nodes},
                              {"dispatcher", r.dispatcher},
                              {"axis", r.axis},
                              {"tokens_of_a_rank", r.shape.T()},
                              {"busiest_over_mean", r.busiest_over_mean},
                              {"lines", lines}};
  for (const DispatchRate& rate : r.rates)
    json["rates"].push_back({{"name", rate.name},
                             {"ms", rate.ms},
                             {"wire_bytes", rate.wire_bytes},
                             {"useful_bytes", rate.useful_bytes},
                             {"wire_gbytes_per_s", rate.wire_gbytes_per_s()}});
  if (r.copy_gbytes_per_s > 0)
    json.update({{"dispatch_combine_gbytes_per_s", r.dispatch_gbytes_per_s},
                 {"copy_gbytes_per_s", r.copy_gbytes_per_s},
                 {"times_slower_than_copy", r.times_slower_than_copy()}});
  print_json(json);
}

void print(const DispatchBench& r, const DispatchBenchSpec& spec, const std::string& launched) {
  fmt::print("{}\n{}: {} tokens per rank, D {}, {} experts, top {}; routing {}; ep {}, etp {}, {} over {}\n",
             where(spec, launched), r.shape.name, r.shape.T(), r.shape.D, r.shape.E, r.shape.K,
             routing_text(spec.routing), r.ep, r.etp, r.dispatcher, r.axis);
  if (r.ranks > 1) fmt::print("rows of the busiest rank {:.2f} times the mean\n", r.busiest_over_mean);
  fmt::print("{:<14} {:>10} {:>16} {:>16} {:>16} {:>16}\n", "call", "median ms", "sent bytes", "of this route",
             "even routing", "logical bytes");
  for (const DispatchLine& l : r.lines)
    fmt::print("{:<14} {:>10.3f} {:>16.0f} {:>16.0f} {:>16.0f} {:>16.0f}\n", l.name, l.median_ms, l.sent_bytes,
               l.route_bytes, l.expected_bytes, l.logical_bytes);
  if (r.nodes > 1) {
    fmt::print("{:<14} {:>16} {:>16} {:>16}\n", fmt::format("{} nodes", r.nodes), "sent across", "of this route",
               "sent inside");
    for (const DispatchLine& l : r.lines)
      fmt::print("{:<14} {:>16.0f} {:>16.0f} {:>16.0f}\n", l.name, l.across_bytes, l.across_route_bytes,
                 l.inside_bytes());
  }
  for (const DispatchRate& rate : r.rates)
    fmt::print("{} alone {:.3f} ms, {:.1f} GB/s on the wire from each rank{}\n", rate.name, rate.ms,
               rate.wire_gbytes_per_s(), padding_text(rate));
  if (r.copy_gbytes_per_s > 0)
    fmt::print("dispatch and combine {:.1f} GB/s, a copy {:.1f} GB/s: {:.2f} times the time of a copy\n",
               r.dispatch_gbytes_per_s, r.copy_gbytes_per_s, r.times_slower_than_copy());
}

}  // namespace

void run_bench_dispatch(DispatchBenchSpec spec, int64_t ranks, bool json) {
  Launch launch = detect_launch(process_environment());
  if (ranks != 1) launch = launch_threads(ranks, launch);
  run_ranks(launch, {.timeout_s = bench_timeout_s()}, [&](Transport& world) {
    DispatchBenchSpec mine = spec;
    Control control(world);
    if (mine.threads == 0) mine.threads = cpu_share(control);
    const DispatchBench report = bench_dispatch(mine, world);
    if (!control.is_root()) return;
    if (json)
      print_as_json(report, mine, launch_text(launch));
    else
      print(report, mine, launch_text(launch));
  });
}

}  // namespace moebius

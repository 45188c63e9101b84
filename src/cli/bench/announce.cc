#include "cli/bench/announce.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "cli/options.h"

namespace moebius {
namespace {

AnnounceBenchSpec spec_of(const BenchOptions& o) {
  const DeviceKind device = device_kind(o.device.empty() ? "cpu" : o.device);
  const char* shape = device == DeviceKind::cuda ? "qwen3-30b-a3b" : "bench-cpu";
  return {.shape = o.shape.empty() ? shape : o.shape,
          .sequences = o.spec.sequences,
          .ranks = o.ranks,
          .routing = o.spec.routing,
          .device = device,
          .threads = num_threads(o.spec.threads),
          .runs = o.runs.value_or(7)};
}

void print_as_json(const AnnounceBench& r, const BenchOptions& o, const std::string& machine) {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const AnnounceLine& l : r.lines) lines.push_back({{"name", l.name}, {"us", l.us}});
  print_json({{"bench", "announce"},
              {"machine", machine},
              {"shape", r.shape.name},
              {"routing", o.routing},
              {"ranks", r.ranks},
              {"tokens_of_a_rank", r.shape.T()},
              {"lines", lines}});
}

}  // namespace

void run_bench_announce(const BenchOptions& o) {
  const AnnounceBenchSpec spec = spec_of(o);
  const AnnounceBench r = bench_announce(spec);
  const std::string machine = bench_machine(spec.device, spec.threads);
  if (o.json) return print_as_json(r, o, machine);
  fmt::print("{}\n{}: {} tokens per rank, {} experts, top {}; routing {}; ep {}\n{:<16} {:>10}\n", machine,
             r.shape.name, r.shape.T(), r.shape.E, r.shape.K, o.routing, r.ranks, "op of rank 0", "us");
  for (const AnnounceLine& l : r.lines) fmt::print("{:<16} {:>10.2f}\n", l.name, l.us);
}

}  // namespace moebius

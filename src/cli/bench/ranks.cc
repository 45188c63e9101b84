#include "cli/bench/ranks.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "bench/ranks.h"
#include "cli/bench/report.h"
#include "cli/options.h"
#include "cli/ranks.h"
#include "device/gpus_found.h"
#include "memory/plan.h"
#include "plan/memory/memory_of_ranks.h"

namespace moebius {
namespace {

// The first rank prints what body returns.
template <class Measure, class Print>
void on_ranks(const RanksBenchOptions& o, Measure&& measure, Print&& print) {
  Launch launch = detect_launch(process_environment());
  if (o.ranks != 1) launch = launch_threads(o.ranks, launch);
  run_ranks(launch, {.timeout_s = bench_timeout_s()}, [&](Transport& world) {
    Control control(world);
    check_same_program(control, "bench");
    const auto report = measure(world, o.threads > 0 ? o.threads : cpu_share(control));
    if (control.is_root()) print(report, launch_text(launch));
  });
}

// The steps of all ranks, and the run with what was chosen about its memory.
struct MeasuredStep {
  RanksBench bench;
  RunSpec run;
  std::string memory;  // empty if nothing was chosen
};

void print_as_json(const RanksBenchOptions& o, const MeasuredStep& step, const std::string& launched) {
  const RanksBench& r = step.bench;
  nlohmann::ordered_json json{{"bench", "step"},
                              {"machine", o.machine},
                              {"launched", launched},
                              {"links", r.links},
                              {"dispatcher", r.dispatcher},
                              {"recipe", o.recipe},
                              {"ranks", r.ranks},
                              {"steps", r.steps},
                              {"tokens_per_step", r.tokens},
                              {"median_ms", r.median_s * 1e3},
                              {"tokens_per_s", r.tokens_per_s},
                              {"first_loss", r.first_loss},
                              {"last_loss", r.last_loss},
                              {"planned_bytes", r.planned_bytes},
                              {"peak_bytes", r.peak_bytes},
                              {"fallback_kernels", r.fallback_kernels},
                              {"comm", to_json(r.of_last_step).at("comm")}};
  if (!step.memory.empty()) json["memory_fit"] = step.memory;
  if (const auto gib = printed_buffer(step.run)) json["offload_buffer"] = *gib;
  if (o.profile) json["ops"] = ops_json(r.ops);
  print_json(json);
}

void print(const RanksBenchOptions& o, const MeasuredStep& step, const std::string& launched) {
  if (o.json) return print_as_json(o, step, launched);
  const RanksBench& r = step.bench;
  if (!step.memory.empty()) fmt::print("{}\n", step.memory);
  fmt::print("{}; {}{}{}; dispatcher {}\n", o.machine, launched, r.links.empty() ? "" : "; ", r.links, r.dispatcher);
  fmt::print("{}: {} tokens per step, median of {} steps {:.1f} ms, {:.0f} tokens/s\n", o.recipe, r.tokens, r.steps,
             r.median_s * 1e3, r.tokens_per_s);
  fmt::print("loss {:.4f} first, {:.4f} last; memory planned {}, peak {}\n", r.first_loss, r.last_loss,
             bytes_text(r.planned_bytes), bytes_text(r.peak_bytes));
  fmt::print("sent and waited in the last step, each the maximum over ranks: {}\n", comm_text(r.of_last_step));
  if (!r.fallback_kernels.empty()) fmt::print("{}\n", r.fallback_kernels);
  if (o.profile) print_profile(r.ops, "per step", r.steps);
}

void print_as_json(const RanksBenchOptions& o, const std::vector<CollectiveLine>& lines, const std::string& launched) {
  nlohmann::ordered_json json;
  for (const CollectiveLine& l : lines) {
    json.push_back({{"name", l.name},
                    {"bytes", l.bytes},
                    {"median_ms", l.median_ms},
                    {"sent_bytes", l.sent_bytes},
                    {"formula_bytes", l.formula_bytes},
                    {"sent_gbytes_per_s", l.sent_gbytes_per_s()}});
    if (l.sent_messages > 0) json.back()["sent_messages"] = l.sent_messages;
  }
  print_json({{"bench", "collectives"}, {"machine", o.machine}, {"launched", launched}, {"lines", json}});
}

void print(const RanksBenchOptions& o, const std::vector<CollectiveLine>& lines, const std::string& launched) {
  if (o.json) return print_as_json(o, lines, launched);
  fmt::print("{}; {}\n{:<20} {:>12} {:>10} {:>9} {:>12} {:>12} {:>10}\n", o.machine, launched, "collective", "bytes",
             "median ms", "messages", "sent bytes", "by formula", "sent GB/s");
  for (const CollectiveLine& l : lines)
    fmt::print("{:<20} {:>12} {:>10.3f} {:>9} {:>12} {:>12.0f} {:>10.3g}\n", l.name, l.bytes, l.median_ms,
               l.sent_messages > 0 ? std::to_string(l.sent_messages) : "-", l.sent_bytes, l.formula_bytes,
               l.sent_gbytes_per_s());
}

}  // namespace

double bench_timeout_s() { return compiles_ptx(gpus_found()) ? 1800 : 60; }

bool has_several_ranks(int64_t ranks) { return ranks != 1 || detect_launch(process_environment()).num_ranks > 1; }

void run_bench_step_of_ranks(const RanksBenchOptions& o, const RunSpec& run) {
  const auto measure = [&](Transport& world, int threads) {
    RunSpec mine = run;
    mine.check(world.size());
    mine.threads = threads;
    Control control(world);
    const ChosenMemory chosen = choose_memory_of_ranks(control, mine, world);
    chosen.apply(mine);
    RanksBench bench = bench_step_of_ranks(mine, {.steps = o.steps, .profile = o.profile}, world);
    return MeasuredStep{.bench = std::move(bench), .run = mine, .memory = chosen.text};
  };
  on_ranks(o, measure, [&](const MeasuredStep& step, const std::string& launched) { print(o, step, launched); });
}

void run_bench_collectives(const RanksBenchOptions& o, DeviceKind device) {
  const auto measure = [&](Transport& world, int) { return bench_collectives(device, world); };
  on_ranks(o, measure,
           [&](const std::vector<CollectiveLine>& lines, const std::string& launched) { print(o, lines, launched); });
}

}  // namespace moebius

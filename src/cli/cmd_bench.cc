#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "memory/plan.h"
#include "train/bench.h"

namespace moebius {
namespace {

struct Options {
  std::string name, recipe = "recipes/bench_cpu.toml";
  std::vector<std::string> overrides;
  int64_t steps = 3;
  BenchSpec spec{.threads = 0};
  bool profile = false, json = false;
};

using Workload = std::vector<BenchLine> (*)(const BenchSpec&);
const std::pair<const char*, Workload> kWorkloads[] = {
    {"attention", bench_attention}, {"experts", bench_experts}, {"gemm", bench_gemm}, {"moe-layer", bench_moe_layer}};

void print_lines(const Options& o, const std::vector<BenchLine>& lines) {
  const std::string machine = machine_line(this_machine());
  if (o.json) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    for (const BenchLine& l : lines) {
      list.push_back({{"name", l.name},
                      {"median_ms", l.median_ms},
                      {"min_ms", l.min_ms},
                      {"runs", l.runs},
                      {"gflops_per_s", l.gflops_per_s()},
                      {"gbytes_per_s", l.gbytes_per_s()},
                      {"checksum", l.checksum},
                      {"expected", l.expected}});
    }
    return print_json({{"bench", o.name}, {"machine", machine}, {"threads", o.spec.threads}, {"lines", list}});
  }
  fmt::print("{}; {} threads\n{:<18} {:>10} {:>10} {:>10} {:>8}  {:>12} {:>12}\n", machine, o.spec.threads, o.name,
             "median ms", "min ms", "GFLOP/s", "GB/s", "checksum", "expected");
  for (const BenchLine& l : lines) {
    fmt::print("{:<18} {:>10.3f} {:>10.3f} {:>10.1f} {:>8.1f}  {:>12.5g} {:>12.5g}\n", l.name, l.median_ms, l.min_ms,
               l.gflops_per_s(), l.gbytes_per_s(), l.checksum, l.expected);
  }
}

// Operations by falling time, a step each.
std::vector<std::pair<std::string, OpTotal>> by_time(const StepBench& r) {
  std::vector<std::pair<std::string, OpTotal>> ops(r.ops.begin(), r.ops.end());
  std::sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) { return a.second.time_us > b.second.time_us; });
  return ops;
}

void print_profile(const StepBench& r) {
  double total_us = 0;
  for (const auto& [name, op] : r.ops) total_us += op.time_us;
  fmt::print("{:<24} {:>7} {:>10} {:>10} {:>8} {:>7}\n", "op, a step", "calls", "ms", "GFLOP/s", "GB/s", "share");
  for (const auto& [name, op] : by_time(r)) {
    const double us = std::max(op.time_us, 1e-3);
    fmt::print("{:<24} {:>7} {:>10.2f} {:>10.1f} {:>8.1f} {:>6.1f}%\n", name, op.calls / r.steps,
               op.time_us / 1e3 / r.steps, op.cost.flops / us / 1e3, op.cost.bytes / us / 1e3,
               100 * op.time_us / total_us);
  }
}

void print_step(const Options& o, const StepBench& r) {
  const std::string machine = machine_line(this_machine());
  if (!o.json) {
    fmt::print("{}; {} threads\n", machine, o.spec.threads);
    fmt::print("{}: {} tokens a step, median of {} steps {:.3f} s\n", o.recipe, r.tokens, r.steps, r.median_s);
    fmt::print("{:.0f} tokens/s, {:.3f} model TFLOP/s\n", r.tokens_per_s, r.model_tflops);
    fmt::print("bf16 matrix rate: oneDNN {:.3f} TFLOP/s, ratio {:.1f} %; our gemm {:.3f} TFLOP/s, ratio {:.1f} %\n",
               r.onednn_tflops, 100 * r.ratio_to_onednn(), r.gemm_tflops, 100 * r.ratio_to_gemm());
    fmt::print("loss {:.4f} first, {:.4f} last; memory planned {}, peak resident {}\n", r.first_loss, r.last_loss,
               bytes_text(r.planned_bytes), bytes_text(r.peak_rss_bytes));
    if (o.profile) print_profile(r);
    return;
  }
  nlohmann::ordered_json object{{"bench", "step"},
                                {"machine", machine},
                                {"threads", o.spec.threads},
                                {"recipe", o.recipe},
                                {"steps", r.steps},
                                {"tokens_per_step", r.tokens},
                                {"median_s", r.median_s},
                                {"tokens_per_s", r.tokens_per_s},
                                {"model_tflops", r.model_tflops},
                                {"onednn_bf16_tflops", r.onednn_tflops},
                                {"ratio_to_onednn", r.ratio_to_onednn()},
                                {"gemm_bf16_tflops", r.gemm_tflops},
                                {"ratio_to_gemm", r.ratio_to_gemm()},
                                {"first_loss", r.first_loss},
                                {"last_loss", r.last_loss},
                                {"planned_bytes", r.planned_bytes},
                                {"peak_rss_bytes", r.peak_rss_bytes}};
  for (const auto& [name, op] : by_time(r)) {
    object["ops"].push_back({{"name", name},
                             {"calls", op.calls},
                             {"time_us", op.time_us},
                             {"flops", op.cost.flops},
                             {"bytes", op.cost.bytes}});
  }
  print_json(object);
}

int run_bench(Options& o) {
  o.spec.threads = num_threads(o.spec.threads);
  MOEBIUS_CHECK(usage, o.spec.runs >= 1, "--runs: expected at least 1; got {}", o.spec.runs);
  if (o.name == "step") {
    RunSpec run = load_run_spec(o.recipe, o.overrides);
    run.check(1);
    run.threads = o.spec.threads;
    print_step(o, bench_step(run, o.steps, o.profile));
    return 0;
  }
  for (const auto& [name, workload] : kWorkloads) {
    if (o.name != name) continue;
    print_lines(o, workload(o.spec));
    return 0;
  }
  std::string names;
  for (const auto& [name, workload] : kWorkloads) names += std::string(name) + ", ";
  MOEBIUS_FAIL(usage, "bench: expected {}or step; got \"{}\"", names, o.name);
}

}  // namespace

void add_bench(Cli& cli) {
  CLI::App* command =
      cli.app.add_subcommand("bench", "named workloads, timed: gemm, attention, experts, moe-layer, step");
  const auto o = std::make_shared<Options>();
  command->add_option("NAME", o->name, "the workload")->required();
  command->add_option("--runs", o->spec.runs, "timed runs, of which the median counts")->capture_default_str();
  add_threads_option(*command, o->spec.threads);
  command->add_option("--recipe", o->recipe, "step: the run")->capture_default_str();
  command->add_option("--set", o->overrides, "step: section.key=value")->take_all()->allow_extra_args(false);
  command->add_option("--steps", o->steps, "step: timed steps, after one of warm-up")->capture_default_str();
  command->add_flag("--profile", o->profile, "step: time, rate and share of every op");
  add_json_option(*command, o->json);
  command->callback([&cli, o] { cli.run = [o] { return run_bench(*o); }; });
}

}  // namespace moebius

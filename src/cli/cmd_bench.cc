#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/bench_dispatch.h"
#include "cli/bench_ranks.h"
#include "cli/command.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "core/accelerator.h"
#include "memory/plan.h"
#include "train/bench.h"

namespace moebius {
namespace {

struct Options {
  std::string name, recipe, device, shape, routing = "balanced";
  std::vector<std::string> overrides;
  std::string dispatcher = "auto";
  std::optional<int64_t> runs;
  int64_t steps = 3, ranks = 1, etp = 1;
  BenchSpec spec{.threads = 0};
  bool profile = false, json = false;
};

using Workload = BenchReport (*)(const BenchSpec&);
const std::pair<const char*, Workload> kWorkloads[] = {
    {"attention", bench_attention}, {"experts", bench_experts}, {"gemm", bench_gemm}, {"moe-layer", bench_moe_layer}};

// The machine, and the GPU when that is what is timed.
std::string where(DeviceKind device, int threads) {
  const std::string cpu = machine_line(this_machine());
  if (device == DeviceKind::cpu) return fmt::format("{}; {} threads", cpu, threads);
  const AcceleratorInfo gpu = Accelerator().info();
  return fmt::format("{}, CUDA {}, driver {}; {}", gpu.name, gpu.runtime, gpu.driver, cpu);
}

double peak_share(const BenchReport& r, const BenchLine& l) { return l.gflops_per_s() * 1e9 / r.ceilings.flops_per_s; }
double roofline_share(const BenchLine& l) { return l.roofline_ms / l.median_ms; }

nlohmann::ordered_json line_json(const BenchReport& r, const BenchLine& l) {
  nlohmann::ordered_json json{{"name", l.name},
                              {"median_ms", l.median_ms},
                              {"min_ms", l.min_ms},
                              {"runs", l.runs},
                              {"gflops_per_s", l.gflops_per_s()},
                              {"gbytes_per_s", l.gbytes_per_s()},
                              {"share_of_peak", peak_share(r, l)}};
  if (l.roofline_ms > 0) json.update({{"roofline_ms", l.roofline_ms}, {"share_of_roofline", roofline_share(l)}});
  json.update({{"checksum", l.checksum}, {"expected", l.expected}});
  return json;
}

void print_json_report(const Options& o, const BenchReport& r, const std::string& machine) {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const BenchLine& l : r.lines) lines.push_back(line_json(r, l));
  nlohmann::ordered_json json{{"bench", o.name},
                              {"machine", machine},
                              {"device", o.device},
                              {"threads", o.spec.threads},
                              {"shape", o.spec.shape},
                              {"routing", o.routing},
                              {"zipf_exponent", o.spec.routing.exponent},
                              {"peak_gflops_per_s", r.ceilings.flops_per_s / 1e9},
                              {"peak_gbytes_per_s", r.ceilings.bytes_per_s / 1e9},
                              {"lines", lines}};
  if (r.kept_bytes > 0) json["kept_bytes"] = r.kept_bytes;
  print_json(json);
}

void print_report(const Options& o, const BenchReport& r) {
  const std::string machine = where(o.spec.device, o.spec.threads);
  if (o.json) return print_json_report(o, r, machine);
  fmt::print("{}\n{}, routing {}; bf16 matrix rate {:.1f} GFLOP/s, copy {:.1f} GB/s", machine, o.spec.shape, o.routing,
             r.ceilings.flops_per_s / 1e9, r.ceilings.bytes_per_s / 1e9);
  if (r.kept_bytes > 0) fmt::print("; kept for backward {}", bytes_text(r.kept_bytes));
  fmt::print("\n{:<24} {:>10} {:>10} {:>10} {:>8} {:>7} {:>9}  {:>12} {:>12}\n", o.name, "median ms", "min ms",
             "GFLOP/s", "GB/s", "of peak", "roofline", "checksum", "expected");
  for (const BenchLine& l : r.lines) {
    fmt::print("{:<24} {:>10.3f} {:>10.3f} {:>10.1f} {:>8.1f} {:>6.1f}% {:>8.1f}%  {:>12.5g} {:>12.5g}\n", l.name,
               l.median_ms, l.min_ms, l.gflops_per_s(), l.gbytes_per_s(), 100 * peak_share(r, l),
               100 * roofline_share(l), l.checksum, l.expected);
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

// The step beside what this GPU can do, by its maker and as measured in the same run.
void print_shares(const StepBench& r) {
  if (r.datasheet_tflops > 0)
    fmt::print("{:.1f} % of the data sheet's {:.1f} TFLOP/s (MFU); ", 100 * r.mfu(), r.datasheet_tflops);
  fmt::print("{:.1f} % of the roofline: {:.1f} ms, each op at the matrix rate below or {:.0f} GB/s of a copy\n",
             100 * r.ratio_to_roofline(), r.roofline_s * 1e3, r.ceilings.bytes_per_s / 1e9);
}

std::string predicted_text(const StepBench& r) {
  if (r.predicted_bytes == 0) return "";
  return fmt::format(", predicted {} ({:+.1f} %)", bytes_text(r.predicted_bytes),
                     100.0 * (static_cast<double>(r.peak_bytes) / static_cast<double>(r.predicted_bytes) - 1));
}

void print_step_text(const Options& o, const StepBench& r) {
  fmt::print("{}: {} tokens a step, median of {} steps {:.1f} ms\n", o.recipe, r.tokens, r.steps, r.median_s * 1e3);
  fmt::print("{:.0f} tokens/s, {:.3f} model TFLOP/s\n", r.tokens_per_s, r.model_tflops);
  if (r.roofline_s > 0) print_shares(r);
  fmt::print("bf16 matrix rate: ");
  if (r.onednn_tflops > 0)
    fmt::print("oneDNN {:.3f} TFLOP/s, ratio {:.1f} %; ", r.onednn_tflops, 100 * r.ratio_to_onednn());
  fmt::print("our gemm {:.3f} TFLOP/s, ratio {:.1f} %\n", r.gemm_tflops, 100 * r.ratio_to_gemm());
  fmt::print("loss {:.4f} first, {:.4f} last; memory planned {}, peak {}{}\n", r.first_loss, r.last_loss,
             bytes_text(r.planned_bytes), bytes_text(r.peak_bytes), predicted_text(r));
}

void print_step(const Options& o, const RunSpec& run, const StepBench& r) {
  const std::string machine = where(run.device, o.spec.threads);
  if (!o.json) {
    fmt::print("{}\n", machine);
    print_step_text(o, r);
    if (o.profile) print_profile(r);
    return;
  }
  nlohmann::ordered_json object{{"bench", "step"},
                                {"machine", machine},
                                {"device", o.device},
                                {"threads", o.spec.threads},
                                {"recipe", o.recipe},
                                {"steps", r.steps},
                                {"tokens_per_step", r.tokens},
                                {"median_s", r.median_s},
                                {"median_ms", r.median_s * 1e3},
                                {"tokens_per_s", r.tokens_per_s},
                                {"model_tflops", r.model_tflops},
                                {"gemm_bf16_tflops", r.gemm_tflops},
                                {"ratio_to_gemm", r.ratio_to_gemm()},
                                {"first_loss", r.first_loss},
                                {"last_loss", r.last_loss},
                                {"planned_bytes", r.planned_bytes},
                                {"peak_bytes", r.peak_bytes}};
  if (r.onednn_tflops > 0)
    object.update({{"onednn_bf16_tflops", r.onednn_tflops}, {"ratio_to_onednn", r.ratio_to_onednn()}});
  if (r.roofline_s > 0)
    object.update({{"predicted_bytes", r.predicted_bytes},
                   {"peak_gflops_per_s", r.ceilings.flops_per_s / 1e9},
                   {"peak_gbytes_per_s", r.ceilings.bytes_per_s / 1e9},
                   {"share_of_peak", r.ratio_to_gemm()},
                   {"roofline_ms", r.roofline_s * 1e3},
                   {"share_of_roofline", r.ratio_to_roofline()}});
  if (r.datasheet_tflops > 0)
    object.update({{"datasheet_bf16_tflops", r.datasheet_tflops}, {"share_of_datasheet", r.mfu()}});
  for (const auto& [name, op] : by_time(r)) {
    object["ops"].push_back({{"name", name},
                             {"calls", op.calls},
                             {"time_us", op.time_us},
                             {"flops", op.cost.flops},
                             {"bytes", op.cost.bytes}});
  }
  print_json(object);
}

RanksBenchOptions on_ranks(const Options& o, DeviceKind device) {
  return {.machine = where(device, o.spec.threads),
          .recipe = o.recipe,
          .ranks = o.ranks,
          .steps = o.steps,
          .threads = o.spec.threads,
          .json = o.json};
}

int run_collectives(const Options& o) {
  const DeviceKind device = device_kind(o.device.empty() ? "cpu" : o.device);
  run_bench_collectives(on_ranks(o, device), device);
  return 0;
}

// The recipe's own device counts where --device says none.
int run_step(Options& o) {
  const bool on_gpu = o.device == "cuda";
  if (o.recipe.empty()) o.recipe = on_gpu ? "recipes/bench_qwen3_30b_a3b_8layers.toml" : "recipes/bench_cpu.toml";
  RunSpec run = load_run_spec(o.recipe, o.overrides);
  if (o.device.empty()) o.device = name_of(run.device);
  run.device = device_kind(o.device);
  if (has_several_ranks(o.ranks)) {
    run_bench_step_of_ranks(on_ranks(o, run.device), run);
    return 0;
  }
  run.check(1);
  o.spec.threads = num_threads(o.spec.threads);
  run.threads = o.spec.threads;
  print_step(o, run, bench_step(run, o.steps, o.profile));
  return 0;
}

BenchRouting::Kind routing_kind(const std::string& name) {
  MOEBIUS_CHECK(usage, name == "balanced" || name == "zipf", "--routing: expected balanced or zipf; got \"{}\"", name);
  return name == "zipf" ? BenchRouting::Kind::zipf : BenchRouting::Kind::balanced;
}

// Ranks share the processors unless told otherwise.
int run_dispatch(const Options& o) {
  MOEBIUS_CHECK(usage, o.device.empty() || o.device == "cpu",
                "bench dispatch: communication moves memory of the cpu; got --device {}", o.device);
  run_bench_dispatch({.shape = o.shape.empty() ? "bench-cpu" : o.shape,
                      .routing = o.spec.routing,
                      .dispatcher = o.dispatcher,
                      .etp = o.etp,
                      .threads = o.spec.threads,
                      .runs = o.runs.value_or(7)},
                     o.ranks, o.json);
  return 0;
}

int run_bench(Options& o) {
  MOEBIUS_CHECK(usage, !o.runs || *o.runs >= 1, "--runs: expected at least 1; got {}", *o.runs);
  o.spec.routing.kind = routing_kind(o.routing);
  if (o.name == "dispatch") return run_dispatch(o);
  if (o.name == "collectives") return run_collectives(o);
  if (o.name == "step") return run_step(o);
  o.spec.threads = num_threads(o.spec.threads);
  if (o.device.empty()) o.device = "cpu";
  o.spec.device = device_kind(o.device);
  o.spec.runs = o.runs.value_or(0);
  o.spec.shape = o.shape;
  if (o.shape.empty()) o.spec.shape = o.spec.device == DeviceKind::cuda ? "qwen3-30b-a3b" : "bench-cpu";
  for (const auto& [name, workload] : kWorkloads) {
    if (o.name != name) continue;
    print_report(o, workload(o.spec));
    return 0;
  }
  std::string names;
  for (const auto& [name, workload] : kWorkloads) names += std::string(name) + ", ";
  MOEBIUS_FAIL(usage, "bench: expected {}dispatch, collectives or step; got \"{}\"", names, o.name);
}

}  // namespace

void add_bench(Cli& cli) {
  CLI::App* command = cli.app.add_subcommand(
      "bench", "named workloads, timed: gemm, attention, experts, moe-layer, dispatch, collectives, step");
  const auto o = std::make_shared<Options>();
  command->add_option("NAME", o->name, "the workload")->required();
  command->add_option("--runs", o->runs, "timed runs, of which the median counts; default 7, on a GPU by their length");
  command->add_option("--device", o->device, "cpu or cuda; default: what the recipe of a step says, else cpu");
  command->add_option("--shape", o->shape,
                      "bench-cpu, mixtral-8x7b, qwen3-30b-a3b, deepseek-v3-8-local or olmoe; the first is the CPU's");
  command->add_option("--routing", o->routing, "experts, moe-layer, dispatch: balanced or zipf")->capture_default_str();
  command->add_option("--zipf", o->spec.routing.exponent, "the exponent of zipf")->capture_default_str();
  add_threads_option(*command, o->spec.threads);
  command->add_option("--recipe", o->recipe,
                      "step: the run; default recipes/bench_cpu.toml, on a GPU bench_qwen3_30b_a3b_8layers");
  command->add_option("--set", o->overrides, "step: section.key=value")->take_all()->allow_extra_args(false);
  command->add_option("--steps", o->steps, "step: timed steps, after one of warm-up")->capture_default_str();
  command->add_flag("--profile", o->profile, "step: time, rate and share of every op");
  command->add_option("--ranks", o->ranks, "dispatch, collectives, step: ranks as threads; mpirun starts processes")
      ->capture_default_str();
  command->add_option("--etp", o->etp, "dispatch: ranks of one expert; ep is what is left")->capture_default_str();
  command->add_option("--dispatcher", o->dispatcher, "dispatch: auto, allgather or alltoall")->capture_default_str();
  add_json_option(*command, o->json);
  command->callback([&cli, o] { cli.run = [o] { return run_bench(*o); }; });
}

}  // namespace moebius

#include <filesystem>
#include <memory>

#include "cli/bench/announce.h"
#include "cli/bench/dispatch.h"
#include "cli/bench/machine.h"
#include "cli/bench/precision.h"
#include "cli/bench/ranks.h"
#include "cli/bench/report.h"
#include "cli/command.h"
#include "cli/options.h"
#include "config/dispatcher_choice.h"
#include "model/gpu_products.h"
#include "plan/memory/chosen_memory.h"

namespace moebius {
namespace {

RanksBenchOptions on_ranks(const BenchOptions& o, DeviceKind device) {
  return {.machine = bench_machine(device, o.spec.threads),
          .recipe = o.recipe,
          .ranks = o.ranks,
          .steps = o.steps,
          .threads = o.spec.threads,
          .json = o.json,
          .profile = o.profile};
}

int run_collectives(const BenchOptions& o) {
  const DeviceKind device = device_kind(o.device.empty() ? "cpu" : o.device);
  run_bench_collectives(on_ranks(o, device), device);
  return 0;
}

std::string default_recipe(bool on_gpu) {
  const char* recipe = on_gpu ? "recipes/bench_qwen3_30b_a3b_8layers.toml" : "recipes/bench_cpu.toml";
  MOEBIUS_CHECK(
      usage, std::filesystem::exists(recipe),
      "bench step: expected the recipe {} below the working directory; it does not exist; change to the folder "
      "of Moebius' sources, or name a recipe with --recipe",
      recipe);
  return recipe;
}

int run_step_of_ranks(const BenchOptions& o, const RunSpec& run) {
  MOEBIUS_CHECK(usage, !o.hash, "bench step: --hash needs one rank; leave it out, or run without --ranks");
  RunSpec here = run;
  if (run.device == DeviceKind::cuda) set_f8_kernels(here, gpus_found(), o.ranks);
  run_bench_step_of_ranks(on_ranks(o, run.device), here);
  return 0;
}

ChosenMemory chosen_memory(const RunSpec& run) {
  if (!chooses_memory(run)) return {.run = run};
  FitMachines machines = fit_machine(run.device, 1);
  if (run.device == DeviceKind::cuda) machines.gpu_bytes = gpu_bytes_here(1);
  return choose_memory(run, 1, machines);
}

// Without --device the recipe's own device counts.
int run_step(BenchOptions& o) {
  if (o.recipe.empty()) o.recipe = default_recipe(o.device == "cuda");
  RunSpec run = load_run_spec(o.recipe, o.overrides);
  if (o.device.empty()) o.device = name_of(run.device);
  run.device = device_kind(o.device);
  if (has_several_ranks(o.ranks)) return run_step_of_ranks(o, run);
  run.check(1);
  o.spec.threads = num_threads(o.spec.threads);
  run.threads = o.spec.threads;
  if (run.device == DeviceKind::cuda) set_f8_kernels(run, gpus_found(), 1);
  const ChosenMemory chosen = chosen_memory(run);
  chosen.apply(run);
  print_step(o, run, chosen.text, bench_step(run, {.steps = o.steps, .profile = o.profile, .hash = o.hash}));
  return 0;
}

// Without --device the recipe's own device counts, as for a step. The default recipe is quantised to FP8.
int run_precision(BenchOptions& o) {
  if (o.recipe.empty()) {
    o.recipe = default_recipe(o.device == "cuda");
    o.overrides.insert(o.overrides.begin(), "precision.recipe=fp8_block");
  }
  RunSpec run = load_run_spec(o.recipe, o.overrides);
  if (o.device.empty()) o.device = name_of(run.device);
  run.device = device_kind(o.device);
  run.check(1);
  o.spec.threads = num_threads(o.spec.threads);
  run.threads = o.spec.threads;
  print_precision(o, run, bench_precision(run, o.runs.value_or(0)));
  return 0;
}

// Without --threads the ranks share the processors.
int run_dispatch(const BenchOptions& o) {
  const DeviceKind device = device_kind(o.device.empty() ? "cpu" : o.device);
  const char* shape = device == DeviceKind::cuda ? "qwen3-30b-a3b" : "bench-cpu";
  run_bench_dispatch({.shape = o.shape.empty() ? shape : o.shape,
                      .routing = o.spec.routing,
                      .dispatcher = dispatcher_kind(o.dispatcher, "bench dispatch: --dispatcher"),
                      .etp = o.etp,
                      .ranks_per_node = o.ranks_per_node,
                      .device = device,
                      .threads = o.spec.threads,
                      .runs = o.runs.value_or(7),
                      .sms = narrow<int>(o.sms),
                      .kernels = o.spec.kernels},
                     o.ranks, o.json);
  return 0;
}

int run_on_device(BenchOptions& o, BenchReport (*workload)(const BenchSpec&)) {
  o.spec.threads = num_threads(o.spec.threads);
  if (o.device.empty()) o.device = "cpu";
  o.spec.device = device_kind(o.device);
  o.spec.runs = o.runs.value_or(0);
  o.spec.shape = o.shape;
  o.spec.profile = o.profile;
  if (o.shape.empty()) o.spec.shape = o.spec.device == DeviceKind::cuda ? "qwen3-30b-a3b" : "bench-cpu";
  print_report(o, workload(o.spec));
  return 0;
}

int run_bench(const Command& command, BenchOptions& o, Log& log) {
  check_bench_options(command, o);
  if (o.name == "dispatch") return run_dispatch(o);
  if (o.name == "announce") {
    run_bench_announce(o);
    return 0;
  }
  if (o.name == "collectives") return run_collectives(o);
  if (o.name == "step") return run_step(o);
  if (o.name == "precision") return run_precision(o);
  if (o.name == "machine") {
    run_bench_machine(o, log);
    return 0;
  }
  if (o.name == "attention") return run_on_device(o, bench_attention);
  if (o.name == "experts") return run_on_device(o, bench_experts);
  return run_on_device(o, o.name == "gemm" ? bench_gemm : bench_moe_layer);
}

}  // namespace

void add_bench(Cli& cli) {
  Command* command = cli.program.add_subcommand(
      "bench",
      "times a workload: gemm, attention, experts, moe-layer, dispatch, announce, collectives, step, precision or "
      "machine");
  const auto o = std::make_shared<BenchOptions>();
  add_bench_options(*command, *o);
  command->callback([&cli, command, o] { cli.run = [&cli, command, o] { return run_bench(*command, *o, cli.log); }; });
}

}  // namespace moebius

// The run and its engine as they would be on the machine of a plan, and what that machine cannot run.
#include <fmt/format.h>

#include <algorithm>

#include "config/check/hopper_check.h"
#include "core/error.h"
#include "plan/predict.h"

namespace moebius {

RunSpec run_on(RunSpec run, const PlanMachine& machine, PlanSystem system) {
  run.device = machine.is_gpu ? DeviceKind::cuda : DeviceKind::cpu;
  if (system == PlanSystem::moebius && (!machine.has_hopper_kernels() || run.kernels != KernelChoice::automatic))
    run.precision.has_f8_kernels = false;
  if (!machine.is_gpu && run.threads == 0) run.threads = static_cast<int64_t>(machine.threads);
  run.rates = machine.exchange_rates();
  return run;
}

DispatcherChoice dispatcher_on(const RunSpec& run, int64_t ranks, const PlanMachine& machine) {
  const int64_t reached = machine.of_rank(run.threads).ranks_of_windows();
  const std::string source = fmt::format("{}: {} ranks of a domain are on one host", machine.name, reached);
  return dispatcher_choice(run, reach_on_machines(run.parallel, ranks, reached, source));
}

RunSpec run_of_ranks_on(RunSpec run, int64_t ranks, const PlanMachine& machine, PlanSystem system) {
  run = run_on(std::move(run), machine, system);
  if (system == PlanSystem::moebius && run.parallel.dispatcher == DispatcherKind::automatic)
    run.parallel.dispatcher = dispatcher_on(run, ranks, machine).kind;
  return run;
}

EngineSpec planned_engine_spec_on(const RunSpec& run, int64_t ranks, const PlanMachine& machine, RunChecks checks) {
  EngineSpec spec = planned_engine_spec(run, ranks, checks);
  spec.counts_for_hopper = machine.counts_for_hopper();
  return spec;
}

void check_machine(const PlanMachine& machine, const Assumptions& assume) {
  MOEBIUS_CHECK(usage, machine.has_shares[static_cast<size_t>(assume.system)],
                "plan: the machine {} has no table [share.{}]; add it, or assume another system", machine.name,
                name_of(assume.system));
  const bool is_low = assume.precision != PlanPrecision::from_recipe,
             is_4_bits = assume.precision == PlanPrecision::nvfp4;
  MOEBIUS_CHECK(usage, !is_low || (is_4_bits ? machine.nvfp4_tflops : machine.fp8_tflops) > 0,
                "plan: the machine {} has no products in {} bits (rank.{} = 0); leave --assume precision out",
                machine.name, is_4_bits ? 4 : 8, is_4_bits ? "nvfp4_tflops" : "fp8_tflops");
}

void check_kernels(const RunSpec& run, const PlanMachine& machine, PlanSystem system) {
  if (!machine.is_gpu || machine.capability == 0 || system != PlanSystem::moebius) return;
  check_hopper_needs(hopper_needs(run), machine.capability / 10, machine.capability % 10);
}

void check_kernels_of_layouts(RunSpec run, const PlanMachine& machine, PlanSystem system, bool keeps_recipe) {
  // Whatever the run's own layout is, the search is for layouts that split batches among ranks of experts.
  run.parallel.ep = std::max<int64_t>(run.parallel.ep, 2);
  if (!keeps_recipe) run.precision.recipe = PrecisionRecipe::none;
  check_kernels(run, machine, system);
}

}  // namespace moebius

#include "plan/memory/chosen_memory.h"

#include "config/recipe/memory_keys.h"
#include "plan/memory/fit_memory.h"
#include "plan/memory/state_buffer.h"

namespace moebius {
namespace {

constexpr const char* kGpu = "the memory of the GPU";

ChosenMemory by_fit(MemoryFit fit) {
  ChosenMemory chosen{.text = fit.text()};  // the text names keys of fit.run
  chosen.run = std::move(fit.run);
  if (fit.buffer) chosen.buffer_limit = fit.buffer->limit_bytes < fit.fit_bytes ? kGpu : "memory.fit";
  return chosen;
}

ChosenMemory by_gpu(const RunSpec& run, const RunMemory& memory, int64_t gpu_bytes) {
  const StateBuffer buffer = choose_state_buffer(memory, without_margin(gpu_bytes));
  ChosenMemory chosen{.run = run, .text = buffer.text(gpu_bytes), .buffer_limit = kGpu};
  chosen.run.optimizer.offload_buffer = buffer.gib;
  return chosen;
}

// Compares the memory of a rank of Megatron Core with memory.fit. The choices of memory.recompute = "auto" are for the
// memory of Moebius.
void check_megatron(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                    const Assumptions& assume) {
  MOEBIUS_CHECK(
      usage, !run.memory.automatic,
      "memory.recompute = \"auto\" chooses for the memory of Moebius, and --assume system=megatron is another; "
      "set a list, or search with --search");
  const int64_t bytes = predict(parts, run, ranks, machine, assume, {.simulate = false}).fullest_rank().total();
  MOEBIUS_CHECK(usage, bytes <= run.memory.fit_bytes,
                "memory.fit = \"{}\": a rank of Megatron Core needs {}; recompute more, or search with --search",
                exact_bytes_text(run.memory.fit_bytes), bytes_text(bytes));
}

}  // namespace

void ChosenMemory::apply(RunSpec& to) const {
  if (text.empty()) return;
  to.memory = run.memory;
  to.optimizer.offload_buffer = run.optimizer.offload_buffer;
}

bool chooses_memory(const RunSpec& run) { return run.memory.fit_bytes > 0 || chooses_buffer(run); }

ChosenMemory choose_memory(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                           const Assumptions& assume) {
  if (run.memory.fit_bytes > 0 && assume.system == PlanSystem::megatron) {
    check_megatron(parts, run, ranks, machine, assume);
    return {.run = run};
  }
  if (run.memory.fit_bytes > 0) return by_fit(fit_memory(parts, run, ranks, machine, assume));
  if (!chooses_buffer(run) || assume.system != PlanSystem::moebius) return {.run = run};
  return by_gpu(run, RunMemory(parts, run, ranks, machine, /*others_too=*/false),
                static_cast<int64_t>(machine.memory_bytes()));
}

ChosenMemory choose_memory(const RunSpec& run, int64_t ranks, const FitMachines& machines) {
  if (run.memory.fit_bytes > 0) return by_fit(fit_memory(run, ranks, machines));
  if (!chooses_buffer(run) || !machines.gpu_bytes) return {.run = run};
  PartLibrary parts;
  const RunMemory memory(parts, run, ranks, usual_machine_of(run.device, machines),
                         machines.gpus.hopper && machines.gpus.others);
  return by_gpu(run, memory, *machines.gpu_bytes);
}

}  // namespace moebius

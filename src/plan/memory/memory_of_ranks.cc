#include "plan/memory/memory_of_ranks.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "comm/gpu/gpu_ranks.h"
#include "config/recipe/memory_keys.h"
#include "device/accelerator.h"
#include "plan/memory/state_buffer.h"

namespace moebius {
namespace {

// Returns what choose_memory() decides, as JSON: recompute, offload and offload_fraction of [memory], offload_buffer of
// [optimizer], and the text of the choice. The ranks of a machine share its CPUs.
std::string chosen_memory(RunSpec run, int num_ranks, const FitMachines& machines) {
  if (run.threads == 0 && run.device == DeviceKind::cpu) run.threads = std::max(1, num_available_cpus() / num_ranks);
  const ChosenMemory chosen = choose_memory(run, num_ranks, machines);
  const MemorySpec& memory = chosen.run.memory;
  nlohmann::json json{{"recompute", recompute_texts(memory.recompute)},
                      {"offload", offload_texts(memory.offload)},
                      {"offload_fraction", memory.offload.fraction},
                      {"text", chosen.text}};
  if (const std::optional<double>& gib = chosen.run.optimizer.offload_buffer) json["offload_buffer"] = *gib;
  return json.dump();
}

// Returns the kinds of GPUs of all ranks' machines, and the least memory of a rank's host and GPU. All ranks call it
// together, since it gathers them.
FitMachines machines_of_ranks(Control& control, const RunSpec& run, Transport& world) {
  FitMachines mine = fit_machine(run.device, control.size());
  if (chooses_buffer(run)) {
    const GpuRanks gpus(world);
    mine.gpu_bytes = gpu_bytes_of_rank(Accelerator::describe(gpus.index()), gpus.num_sharing());
  }
  const nlohmann::json text{{"hopper", mine.gpus.hopper},
                            {"others", mine.gpus.others},
                            {"rank_host_bytes", mine.rank_host_bytes},
                            {"gpu_bytes", mine.gpu_bytes ? nlohmann::json(*mine.gpu_bytes) : nlohmann::json()}};
  std::vector<FitMachines> all;
  for (const std::string& of_rank : control.gather(text.dump())) {
    const nlohmann::json m = nlohmann::json::parse(of_rank);
    all.push_back(
        {.gpus = {.hopper = m.at("hopper"), .others = m.at("others")}, .rank_host_bytes = m.at("rank_host_bytes")});
    if (!m.at("gpu_bytes").is_null()) all.back().gpu_bytes = m.at("gpu_bytes").get<int64_t>();
  }
  return common_machines(all);
}

}  // namespace

ChosenMemory choose_memory_of_ranks(Control& control, const RunSpec& run, Transport& world) {
  ChosenMemory chosen{.run = run};
  if (!chooses_memory(run)) return chosen;
  const FitMachines machines = machines_of_ranks(control, run, world);
  const auto longer = control.between_steps();  // the others wait for the search
  std::string text;
  control.on_root([&] { text = chosen_memory(run, control.size(), machines); });
  const nlohmann::json choice = nlohmann::json::parse(control.from_root(text));
  chosen.run.memory.recompute = parse_recompute(choice.at("recompute")).value();
  chosen.run.memory.offload = parse_offload(choice.at("offload")).value();
  chosen.run.memory.offload.fraction = choice.at("offload_fraction");
  chosen.run.memory.automatic = false;
  if (choice.contains("offload_buffer"))
    chosen.run.optimizer.offload_buffer = choice.at("offload_buffer").get<double>();
  chosen.text = choice.at("text");
  return chosen;
}

}  // namespace moebius

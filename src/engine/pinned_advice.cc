#include "engine/pinned_advice.h"

#include <fmt/format.h>

#include "engine/device_memory.h"

namespace moebius {
namespace {

// "optimizer.offload keeps 57.8 GiB".
std::string who_keeps_on_host(const MemoryPlan& plan) {
  const int64_t activations = plan.offloaded_bytes(), all = plan.bytes(Life::host);
  if (activations == 0) return fmt::format("optimizer.offload keeps {}", bytes_text(all));
  const std::string of_layers = fmt::format("memory.offload keeps {}", bytes_text(activations));
  if (activations == all) return of_layers;
  return fmt::format("{}, and with optimizer.offload all {} are", of_layers, bytes_text(all));
}

std::string host_advice(const MemoryPlan& plan) {
  const int64_t activations = plan.offloaded_bytes();
  std::string advice = "set ";
  if (activations > 0) advice += "a smaller memory.offload_fraction, fewer names in memory.offload, ";
  if (activations < plan.bytes(Life::host))
    advice += "optimizer.state = \"8bit\" or optimizer.master = \"bf16_stochastic\", ";
  advice += "use more ranks on more machines, or keep it on the GPU (";
  advice += activations == plan.bytes(Life::host) ? "memory.offload = []" : "optimizer.offload = false";
  return advice + ")";
}

}  // namespace

void check_pinned_memory(const MemoryPlan& plan, int64_t available, int64_t by_others) {
  const int64_t needed = plan.bytes(Life::host);
  MOEBIUS_CHECK(usage, needed == 0 || needed + by_others <= available,
                "out of memory: {} in pinned memory of the host{}, and {} are available; {}\n{}",
                who_keeps_on_host(plan),
                by_others == 0 ? "" : fmt::format(", other ranks of the machine {}", bytes_text(by_others)),
                bytes_text(available), host_advice(plan), plan.table());
}

void fail_pinning(const MemoryPlan& plan, const OutOfPinnedMemory& refused) {
  if (plan.bytes(Life::host) == 0) MOEBIUS_FAIL(usage, "{}\n{}", refused.what(), plan.table());
  MOEBIUS_FAIL(usage, "{}; {} in pinned memory of the host: {}\n{}", refused.what(), who_keeps_on_host(plan),
               host_advice(plan), plan.table());
}

}  // namespace moebius

#include "engine/pinned_advice.h"

#include <fmt/format.h>

namespace moebius {
namespace {

// Returns the keys that ask for more than activations: "optimizer.offload". weights: how the text names those.
std::string keys_of(const KeptOnHost& kept, const std::string& weights) {
  if (!kept.weights) return "optimizer.offload";
  return kept.states ? weights + " and optimizer.offload" : weights;
}

// "optimizer.offload keeps 57.8 GiB".
std::string who_keeps_on_host(const MemoryPlan& plan, const KeptOnHost& kept) {
  const int64_t activations = plan.offloaded_bytes(), all = plan.bytes(Life::host);
  if (activations == 0) {
    const std::string keys = keys_of(kept, "weights in memory.offload");
    return fmt::format("{} {} {}", keys, kept.weights ? "keep" : "keeps", bytes_text(all));
  }
  const std::string of_layers = fmt::format("memory.offload keeps {}", bytes_text(activations));
  if (activations == all) return of_layers;
  return fmt::format("{} of activations; with {}, {} are", of_layers, keys_of(kept, "its weights"), bytes_text(all));
}

std::string host_advice(const MemoryPlan& plan, const KeptOnHost& kept) {
  const int64_t activations = plan.offloaded_bytes();
  const bool keeps_more = activations < plan.bytes(Life::host);
  std::string advice;
  if (activations > 0) advice += "a smaller memory.offload_fraction, fewer names in memory.offload, ";
  if (keeps_more && kept.states) advice += "optimizer.state = \"8bit\" or optimizer.master = \"bf16_stochastic\", ";
  if (!advice.empty()) advice.insert(0, "set ");
  advice += "use more ranks on more machines, or keep it on the GPU (";
  if (!keeps_more) return advice + "memory.offload = [])";
  if (kept.weights) advice += "remove \"weights\" from memory.offload";
  if (kept.weights && kept.states) advice += ", and set ";
  if (kept.states) advice += "optimizer.offload = false";
  return advice + ")";
}

}  // namespace

void check_pinned_memory(const MemoryPlan& plan, int64_t available, int64_t by_others, const KeptOnHost& kept) {
  const int64_t needed = plan.bytes(Life::host);
  MOEBIUS_CHECK(usage, needed == 0 || needed + by_others <= available,
                "out of memory: {} in pinned memory of the host{}, and {} are available; {}\n{}",
                who_keeps_on_host(plan, kept),
                by_others == 0 ? "" : fmt::format(", other ranks of the machine {}", bytes_text(by_others)),
                bytes_text(available), host_advice(plan, kept), plan.table());
}

void fail_pinning(const MemoryPlan& plan, const OutOfPinnedMemory& refused, const KeptOnHost& kept) {
  if (plan.bytes(Life::host) == 0) MOEBIUS_FAIL(usage, "{}\n{}", refused.what(), plan.table());
  MOEBIUS_FAIL(usage, "{}; {} in pinned memory of the host: {}\n{}", refused.what(), who_keeps_on_host(plan, kept),
               host_advice(plan, kept), plan.table());
}

}  // namespace moebius

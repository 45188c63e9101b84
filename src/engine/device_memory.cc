#include "engine/device_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "ops/gemm/gemm_device.h"

namespace moebius {
namespace {

// The driver allocates whole pages; pieces of less than half a page share one.
constexpr int64_t kPageBytes = int64_t{2} << 20;
// These sizes were measured on an H200 (docs/measurements/memory.md). Our kernels, those of
// cuBLASLt, its handle and the CUDA graphs take 6 MiB in all models. With cuDNN it is 14 to 16 MiB.
constexpr int64_t kCodeBytes = int64_t{6} << 20, kCudnnCodeBytes = int64_t{10} << 20;

int64_t whole_pages(int64_t bytes) { return div_ceil(bytes, kPageBytes) * kPageBytes; }

int64_t pages_of(const std::array<int64_t, kNumLives>& life_bytes) {
  int64_t whole = 0, shared = 0;
  for (int life = 0; life < kNumLives; ++life) {
    if (static_cast<Life>(life) == Life::host) continue;
    const int64_t bytes = life_bytes[static_cast<size_t>(life)];
    if (bytes < kPageBytes / 2)
      shared += bytes;
    else
      whole += whole_pages(bytes);
  }
  return whole + whole_pages(shared);
}

// Returns the bytes that do not depend on the size of the batch.
int64_t fixed_bytes(const MemoryPlan& plan) {
  int64_t bytes = 0;
  for (const Life life : {Life::param, Life::master, Life::grad, Life::layer_grad, Life::optimizer, Life::state})
    bytes += plan.bytes(life);
  return bytes;
}

// "memory.recompute (not yet in it: norm, attention)": the names that the model has layers for;
// empty when all are in it.
std::string more_recompute(const ModelSpec& m, const RecomputeSpec& used) {
  const RecomputeSpec exists{.norm = true,
                             .qkv = true,
                             .mla_up_proj = m.kv_lora_rank > 0 && !used.qkv,
                             .attention = true,
                             .mlp = m.num_moe_layers() < m.num_layers,
                             .shared_expert = m.shared_intermediate_size > 0,
                             .expert_up = m.num_experts > 0,
                             .layer = true};
  std::string names;
  for (const auto& [name, field] : kRecomputeNames)
    if (exists.*field && !(used.*field) && !used.layer) names += (names.empty() ? "" : ", ") + std::string(name);
  return names.empty() ? "" : fmt::format("more of memory.recompute (not in it yet: {})", names);
}

}  // namespace

DeviceMemory DeviceMemory::times(int64_t ranks) const {
  return {.plan_bytes = ranks * plan_bytes,
          .workspace_bytes = ranks * workspace_bytes,
          .code_bytes = ranks * code_bytes,
          .num_ranks = ranks};
}

std::string DeviceMemory::text() const {
  const std::string sharing =
      num_ranks == 1 ? "" : fmt::format(" of the {} ranks that share it, without their contexts", num_ranks);
  return fmt::format("predicted peak on the GPU {}{} (plan {}, workspaces of matrix products {}, kernels {})",
                     bytes_text(total_bytes()), sharing, bytes_text(plan_bytes), bytes_text(workspace_bytes),
                     bytes_text(code_bytes));
}

DeviceMemory device_memory(const MemoryPlan& plan, int64_t stack_bytes, bool with_cudnn) {
  std::array<int64_t, kNumLives> bytes{};
  for (int life = 0; life < kNumLives; ++life) bytes[life] = plan.bytes(static_cast<Life>(life));
  bytes[static_cast<int>(Life::stack)] = stack_bytes;
  return device_memory(bytes, with_cudnn);
}

DeviceMemory device_memory(const std::array<int64_t, kNumLives>& life_bytes, bool with_cudnn) {
  return {.plan_bytes = pages_of(life_bytes),
          .workspace_bytes = whole_pages(kGemmKeptBytes),
          .code_bytes = kCodeBytes + (with_cudnn ? kCudnnCodeBytes : 0)};
}

std::string memory_advice(const MemoryUse& use, const MemoryPlan& plan, int64_t available) {
  const int64_t fixed = fixed_bytes(plan);
  const bool is_fixed_too_much = fixed > available;
  std::vector<std::string> all;
  if (!is_fixed_too_much) {
    if (use.batch > 1) all.push_back("a smaller train.micro_batch (--batch)");
    if (use.training) all.push_back(more_recompute(use.model, use.recompute));
    all.push_back("a shorter train.seq_len (--seq-len)");
  }
  all.push_back(fmt::format("more ranks (parallel.{}tp or pp)", use.model.num_experts > 0 ? "ep, " : ""));
  if (use.training)
    all.push_back(use.has_adapters ? "a smaller lora.rank" : use.freezes ? "a longer train.freeze" : "train.freeze");
  all.push_back("a smaller model, or a larger machine");
  std::erase(all, "");
  return (is_fixed_too_much
              ? fmt::format("{} alone take {}, of any batch: ",
                            use.training ? "weights, gradients and the optimizer" : "weights", bytes_text(fixed))
              : std::string()) +
         fmt::format("use {}", fmt::join(all, ", "));
}

int64_t needed_host_bytes(const MemoryPlan& plan, int64_t stack_bytes) { return plan.total_bytes() + stack_bytes; }

void check_host_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t available, const MemoryUse& use,
                       int64_t by_others) {
  const int64_t needed = needed_host_bytes(plan, stack_bytes);
  MOEBIUS_CHECK(usage, needed + by_others <= available,
                "out of memory: {} are needed, {} of them for the step stack{}, and {} are available; {}\n{}",
                bytes_text(needed), bytes_text(stack_bytes),
                by_others == 0 ? "" : fmt::format(", other ranks of the machine need {}", bytes_text(by_others)),
                bytes_text(available), memory_advice(use, plan, available - by_others), plan.table());
}

int64_t needed_bytes(const MemoryPlan& plan, int64_t stack_bytes) {
  const DeviceMemory needed = device_memory(plan, stack_bytes);
  return needed.plan_bytes + needed.workspace_bytes + kDeviceReserveBytes;
}

void check_device_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t free_bytes, const MemoryUse& use) {
  const DeviceMemory needed = device_memory(plan, stack_bytes);
  const int64_t all = needed_bytes(plan, stack_bytes), beside = all - needed.plan_bytes;
  MOEBIUS_CHECK(usage, all <= free_bytes,
                "out of memory: {} of the GPU are needed: {} for the plan, {} of them for the step stack, {} for "
                "workspaces of matrix products, and {} are kept for kernels and CUDA graphs; {} are available; {}\n{}",
                bytes_text(all), bytes_text(needed.plan_bytes), bytes_text(stack_bytes),
                bytes_text(needed.workspace_bytes), bytes_text(kDeviceReserveBytes),
                bytes_text(std::max<int64_t>(0, free_bytes)), memory_advice(use, plan, free_bytes - beside),
                plan.table());
}

}  // namespace moebius

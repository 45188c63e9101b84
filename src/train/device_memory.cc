#include "train/device_memory.h"

#include <algorithm>

#include "ops/gemm/gemm_cuda.h"

namespace moebius {
namespace {

// What the driver gives; pieces of less than half of one share them.
constexpr int64_t kPageBytes = int64_t{2} << 20;
// As measured on an H200 (docs/memory.md, "On a GPU"): kernels of ours and cuBLASLt's, its handle and recordings are 6
// MiB in all models, and with cuDNN 14 to 16 MiB.
constexpr int64_t kCodeBytes = int64_t{6} << 20, kCudnnCodeBytes = int64_t{10} << 20;

int64_t whole_pages(int64_t bytes) { return div_ceil(bytes, kPageBytes) * kPageBytes; }

int64_t pages_of(const MemoryPlan& plan, int64_t stack_bytes) {
  int64_t whole = 0, shared = 0;
  for (int life = 0; life < kNumLives; ++life) {
    const bool is_stack = static_cast<Life>(life) == Life::stack;
    const int64_t bytes = is_stack ? stack_bytes : plan.bytes(static_cast<Life>(life));
    if (bytes < kPageBytes / 2)
      shared += bytes;
    else
      whole += whole_pages(bytes);
  }
  return whole + whole_pages(shared);
}

constexpr const char* kAdvice =
    "use a smaller train.micro_batch, train.seq_len or model (--batch, --seq-len), or a larger machine";

}  // namespace

std::string DeviceMemory::text() const {
  return fmt::format("predicted peak on the GPU {} (plan {}, workspaces of matrix products {}, kernels {})",
                     bytes_text(total_bytes()), bytes_text(plan_bytes), bytes_text(workspace_bytes),
                     bytes_text(code_bytes));
}

DeviceMemory device_memory(const MemoryPlan& plan, int64_t stack_bytes, bool with_cudnn) {
  return {.plan_bytes = pages_of(plan, stack_bytes),
          .workspace_bytes = whole_pages(cuda::kGemmKeptBytes),
          .code_bytes = kCodeBytes + (with_cudnn ? kCudnnCodeBytes : 0)};
}

void check_host_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t available) {
  const int64_t needed = plan.total_bytes() + stack_bytes;
  MOEBIUS_CHECK(usage, needed <= available,
                "out of memory: {} are needed, {} of them for the step stack, and {} are available; {}\n{}",
                bytes_text(needed), bytes_text(stack_bytes), bytes_text(available), kAdvice, plan.table());
}

int64_t needed_bytes(const MemoryPlan& plan, int64_t stack_bytes) {
  const DeviceMemory needed = device_memory(plan, stack_bytes);
  return needed.plan_bytes + needed.workspace_bytes + kDeviceReserveBytes;
}

void check_device_memory(const MemoryPlan& plan, int64_t stack_bytes, int64_t free_bytes) {
  const DeviceMemory needed = device_memory(plan, stack_bytes);
  const int64_t all = needed_bytes(plan, stack_bytes);
  MOEBIUS_CHECK(usage, all <= free_bytes,
                "out of memory: {} of the GPU are needed: {} for the plan, {} of them for the step stack, {} for "
                "workspaces of matrix products, and {} are kept for kernels and recordings; {} are available; {}\n{}",
                bytes_text(all), bytes_text(needed.plan_bytes), bytes_text(stack_bytes),
                bytes_text(needed.workspace_bytes), bytes_text(kDeviceReserveBytes),
                bytes_text(std::max<int64_t>(0, free_bytes)), kAdvice, plan.table());
}

}  // namespace moebius
